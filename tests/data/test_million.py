"""The generated task: a sample is the same whenever it is made, and a run on it that of a task that stores them all."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import own  # the samples of a client of a stored task

from atoll import LocalEngine, federate
from atoll.data.batches import Split
from atoll.data.million import Million
from atoll.data.recipe import Recipe
from atoll.data.task import Task
from atoll.kernel.errors import DataError, TaskError
