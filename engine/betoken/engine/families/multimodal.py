"""Multimodal models whose text is a language model of another family, of several, or plain, and refused ones."""

from betoken.engine.families.family import Family

MULTIMODAL = Family(
    multimodal=(
        "aria",
        "exaone4_5",
        "internvl",
        "llava",
        "llava_next",
        "llava_next_video",
        "llava_onevision",
        "mistral3",
    )
)

MLLAMA = Family(multimodal=("mllama",), refusal="its layers attend to images in addition to the text")

COHERE_VISION = Family(
    multimodal=("aya_vision", "cohere2_vision"), refusal="its own class leaves out the factor on its logits"
)
