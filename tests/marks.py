"""Marks of tests that need something of the machine."""

import os
import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), reason="compiles: needs a C++ compiler"
)
