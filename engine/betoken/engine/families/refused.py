"""Families that are refused as a whole, by their way of mixing tokens."""

from betoken.engine.families.family import Family

RWKV = Family(model_types=("rwkv",), refusal="its state is divided by a separate sum of exponentials")

XLSTM = Family(model_types=("xlstm",), refusal="its state is scaled by a separate maximum")

INKLING = Family(
    model_types=("inkling_text", "inkling2_text"),
    multimodal=("inkling_mm_model", "inkling2"),
    refusal="a layer convolves keys, values and outputs, and its attention adds logits of distances",
)

INDEXED = Family(
    multimodal=("dots3_note", "mistral_large4"),
    refusal="its attention reads positions selected by a separate index",
)
