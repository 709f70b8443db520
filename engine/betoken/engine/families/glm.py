"""GLM: the text of multimodal ones, and GLM-4.5's layers that draft."""

from betoken.engine.families.family import Family

GLM4_MOE = Family(model_types=("glm4_moe",), draft_tensors=r"model\.layers\.(46|92)\..*")

GLM_V = Family(
    model_types=("glm4v_text", "glm4v_moe_text", "glm_ocr_text"),
    multimodal=("glm46v", "glm4v", "glm4v_moe", "glm_ocr"),
    converted_as={"glm4v_moe_text": "glm4v_moe"},
    towers=("visual.", "model.visual."),
)

GLM5 = Family(multimodal=("glm5_next",), refusal="its attention reads positions selected by a separate index")
