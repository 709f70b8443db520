"""A drafter of tests: its folder would hold this, and the registry one line."""

from dataclasses import dataclass

from betoken.drafters.drafter import Drafted
from betoken.drafters.immediate import ImmediateDrafter
from betoken.drafters.settings import Option, SequenceSettings, setting
from betoken.drafters.spec import DrafterSpec


@dataclass(frozen=True, slots=True)
class MadeSettings(SequenceSettings):
    step: int = setting(1, "Step of `made`.", 1, 9, option="made_step")


class MadeDrafter(ImmediateDrafter):
    """Drafts ids at equal distances after the last one."""

    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def open(self, sequence):
        self.settings.override(sequence.settings)

    def propose(self, sequence, num_tokens):
        step = self.settings.override(sequence.settings).step
        return Drafted(sequence, [sequence.ids[-1] + step * place for place in range(1, num_tokens + 1)])


SPEC = DrafterSpec(
    name="made",
    make=lambda context: MadeDrafter(MadeSettings.of_options(context.settings)),
    explains="accepted from a test",
    colour="red",
    can_attach=True,
    settings=MadeSettings,
    options=(Option("made_weights", str, "", "Weights of `made`.", names_weights=True),),
)
