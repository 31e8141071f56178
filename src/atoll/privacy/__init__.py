"""What a client tells, bounded: clipped sums with noise, and an account of what all releases together give away."""

from atoll.privacy.client_level import ClientPrivacy, parse_privacy
from atoll.privacy.secure import Secure, parse_secure

__all__ = ["ClientPrivacy", "Secure", "parse_privacy", "parse_secure"]
