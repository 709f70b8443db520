"""A drafter on hidden states, and the target whose states it receives, without services."""

import random

import torch

from betoken.drafters.drafter import DraftSequence
from betoken.drafters.features import FeatureSpan
from betoken.engine.batch import Segment
from betoken.engine.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Rig:
    """Reports states and results to a drafter, as a verify worker does."""

    def __init__(self, target, drafter, table):
        self.target, self.drafter, self.table = target, drafter, table

    def states_of(self, ids):
        """[n, 2, H], as the target gives them."""
        page_ids, _ = self.target.page_table.allocate(ids)
        features = self.target.forward([Segment(page_ids, 0, ids, 1)]).features.clone()
        self.target.page_table.release(page_ids)
        return features

    def open(self, prompt_ids, params=GREEDY, output_ids=(), **fields):
        seq = DraftSequence((0, len(self.drafter._sequences)), params, prompt_ids, list(output_ids), 600, **fields)
        self.drafter.open(seq)
        return seq

    def send(self, seqs, first=0, end=None):
        """The states of all positions from `first` on, up to `end`, in one call for all sequences."""
        spans, rows, start = [], [], 0
        for seq in seqs:
            own = self.states_of(seq.ids)[first : len(seq.ids) - 1 if end is None else end]
            spans.append(FeatureSpan(seq, first, start, len(own)))
            rows.append(own)
            start += len(own)
        self.drafter.observe(spans, torch.cat(rows))

    def commit(self, seq, ids):
        """A verification result: `ids` with the states of the positions that it decided."""
        first = len(seq.ids) - 1
        seq.ids.extend(ids)
        seq.output_ids.extend(ids)
        self.drafter.commit(seq, ids)
        self.send([seq], first)

    def draft(self, seqs, num_tokens=8):
        for seq in seqs:
            self.drafter.request(seq, num_tokens)
        drafted = {id(answer.sequence): answer for answer in self.drafter.step()}
        self.drafter.check_integrity()
        return [drafted[id(seq)] for seq in seqs]


def ids_of(seed, length):
    return random.Random(seed).choices(range(1, 100), k=length)
