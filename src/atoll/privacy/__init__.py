"""What a client tells, bounded: clipped sums with noise, and an account of what all releases together give away."""

from atoll.privacy.client_level import ClientPrivacy, parse_privacy

__all__ = ["ClientPrivacy", "parse_privacy"]
