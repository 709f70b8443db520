"""Models of the drafters' tests."""

import pytest


@pytest.fixture
def unsure_runner_class(fake_runner_class):
    class Unsure(fake_runner_class):
        """Finds the id after its own token half as likely, so that rejections are expected."""

        def forward(self, segments):
            output = super().forward(segments)
            for row in output.logits:
                row[(row.argmax() + 1) % self.vocab_size] = 8.6
            return output

    return Unsure
