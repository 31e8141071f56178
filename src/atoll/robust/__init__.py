"""Clients that mean harm: what they may send, and rules that make one reply of many in spite of them."""

from atoll.robust.attacks import ATTACKS, Attack, Backdoor, parse_attack
from atoll.robust.rules import RULES, Robust, parse_rule

__all__ = ["ATTACKS", "RULES", "Attack", "Backdoor", "Robust", "parse_attack", "parse_rule"]
