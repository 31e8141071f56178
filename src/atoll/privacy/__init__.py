"""What a client tells, bounded: clipped sums with noise, and an account of what all releases together give away."""

from atoll.privacy.client_level import ClientPrivacy
from atoll.privacy.local_level import LocalPrivacy
from atoll.privacy.promise import Course
from atoll.privacy.secure import Secure, parse_secure
from atoll.privacy.shares import PrivacyInShares
from atoll.privacy.words import parse_privacy

__all__ = ["ClientPrivacy", "Course", "LocalPrivacy", "PrivacyInShares", "Secure", "parse_privacy", "parse_secure"]
