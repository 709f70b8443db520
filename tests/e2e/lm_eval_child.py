"""One run of lm-eval over a custom task of ten items, in a separate process: it changes loggers and seeds.

Arguments: backend (`local-completions` or `hf`), its arguments as JSON, a folder. Prints the score and the
loglikelihoods as JSON.
"""

import json
import os
import sys
from pathlib import Path

ITEMS = (
    ("def add(a, b):\n    return", [" a + b", " a - b", " None"], 0),
    ("for i in", [" range(10):", " the morning:", " 7"], 0),
    ("import os\nprint(os.path", [".join(", " while", "!!"], 0),
    ("class Point:\n    def __init__", ["(self, x, y):", " = 3", "[0]"], 0),
    ("x = [1, 2, 3]\ny = len(", ["x)", "return", "class"], 0),
    ("if __name__ ==", [' "__main__":', ' "main":', " 0:"], 0),
    ("try:\n    f()\nexcept", [" ValueError:", " for", " 1 +"], 0),
    ("with open(path) as", [" f:", " +", " None:"], 0),
    ("assert x", [" == 1", " def", " )"], 0),
    ("name = 'naïve café'  # ☕\nprint(", ["name)", "é", "☕☕"], 0),
)
TASK = """
task: own_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


def main(backend: str, arguments: str, folder: Path) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    from lm_eval import simple_evaluate  # what it imports reads the environment
    from lm_eval.tasks import TaskManager

    data = folder / "items.jsonl"
    rows = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in ITEMS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own_choices.yaml").write_text(TASK.format(path=data))
    results = simple_evaluate(
        model=backend,
        model_args=json.loads(arguments),
        tasks=["own_choices"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"]["own_choices"], key=lambda sample: sample["doc_id"])
    told = [[[float(value) for value in one] for one in sample["filtered_resps"]] for sample in samples]
    score = results["results"]["own_choices"]["acc,none"]
    sys.stdout.write("\n" + json.dumps({"score": score, "loglikelihoods": told}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
