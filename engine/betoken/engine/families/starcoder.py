"""StarCoder2: GGUF files."""

from betoken.engine.families.family import Architecture, Family

_KEYS = {"attention.key_length": "head_dim", "rope.freq_base": "rope_theta"}

STARCODER2 = Family(model_types=("starcoder2",), gguf={"starcoder2": Architecture("starcoder2", "starcoder2", _KEYS)})
