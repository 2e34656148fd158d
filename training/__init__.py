"""How the embedded models are made: from a seed, on scenes drawn afresh. Not part of the wheel."""
