"""Options of lookahead."""

from pydantic import BaseModel, Field

from betoken.drafters.lookahead.settings import MAX_GUESSES, MAX_NGRAM_SIZE, MAX_STEPS, MAX_WINDOW


class LookaheadOptions(BaseModel):
    """The paper's W, N and G, and the model that is iterated."""

    lookahead_model: str = Field(
        "", description="Model that `lookahead` iterates: a directory, or a hub id; default: --model, else the target."
    )
    lookahead_window: int = Field(15, ge=2, le=MAX_WINDOW, description="W of `lookahead`: columns of its window.")
    lookahead_ngram_size: int = Field(5, ge=2, le=MAX_NGRAM_SIZE, description="N of `lookahead`: tokens of an n-gram.")
    lookahead_guesses: int = Field(15, ge=1, le=MAX_GUESSES, description="G of `lookahead`: most guesses per token.")
    lookahead_steps: int = Field(1, ge=1, le=MAX_STEPS, description="Most steps of `lookahead` after each draft.")
    lookahead_seed_from_prompt: bool = Field(
        False, description="Pool the n-grams of the text itself too, prompt and committed output."
    )
