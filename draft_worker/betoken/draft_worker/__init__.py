"""Draft worker: hosts drafters that guess the target's next tokens. A wrong guess costs time and never changes text."""
