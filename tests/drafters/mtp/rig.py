"""The drafter of a checkpoint's MTP layer, without services."""

from types import SimpleNamespace

from betoken.drafters.drafter import DraftSequence
from betoken.drafters.features import FeatureSpan
from betoken.drafters.mtp.hosting import make_drafter
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.sampling import SamplingParams
from betoken.verify_worker.settings import VerifyWorkerSettings

PROMPT = [5, 17, 42, 5, 17, 88, 3, 42, 5]
DEPTH = 4


class Rig:
    """Our drafter for the same checkpoint, which is sent the states of transformers' target."""

    def __init__(self, path, reference, **settings):
        self.reference = reference
        options = {"model": str(path), "dtype": "float32", "compile": "off", "num_pages": 64}
        config = EngineConfig(**options, feature_layers=lambda num_layers: (num_layers,), self_check=False)
        host = SimpleNamespace(settings=VerifyWorkerSettings(**options), target=load_runner(config))
        self.drafter = make_drafter(host)
        self.settings = {name: str(value) for name, value in settings.items()}

    def open(self, prompt):
        seq = DraftSequence((0, 1), SamplingParams(temperature=0.0), prompt, [], 600, settings=self.settings)
        self.drafter.open(seq)
        self._send(seq, 0)
        return seq

    def commit(self, seq, ids):
        first = len(seq.ids) - 1
        seq.ids.extend(ids)
        seq.output_ids.extend(ids)
        self.drafter.commit(seq, ids)
        self._send(seq, first)

    def draft(self, seq, num_tokens):
        self.drafter.request(seq, num_tokens)
        (drafted,) = self.drafter.step()
        self.drafter.check_integrity()
        return drafted.draft_ids

    def _send(self, seq, first):
        states = self.reference.states(seq.ids[:-1])[first:]
        self.drafter.observe([FeatureSpan(seq, first, 0, len(states))], states[:, None])
