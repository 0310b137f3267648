"""What `test_export.py` runs in a process of its own, where megalatent cannot be imported.

Arguments: a folder with `ids.json`, and names of exports in it. Prints one line of JSON with what
each export, loaded with its own code, makes of the token ids.
"""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM


def text(model, ids, mode=None, **options):
    return model.generate(ids, mode=mode, do_sample=False, max_new_tokens=5, **options).tolist()


def compiled(model, ids, mode):
    """The text of compiled decoding steps, and how many graphs they took."""
    graphs, eager = [], model.forward

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    step = torch.compile(eager, backend=backend, fullgraph=True)

    @functools.wraps(eager)
    def forward(*args, **kwargs):  # the prompt runs uncompiled, as on a GPU
        return (step if kwargs["input_ids"].shape[1] == 1 else eager)(*args, **kwargs)

    model.forward = forward
    out = text(model, ids, mode, cache_implementation="static")
    model.forward = eager
    torch._dynamo.reset()
    return out, len(graphs)


def hide_megalatent() -> None:
    """Take out the finder of an editable installation: the export must do without the package."""
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if "megalatent" not in str(getattr(finder, "__module__", ""))
    ]


def main(folder: Path, names: list[str]) -> None:
    hide_megalatent()
    assert importlib.util.find_spec("megalatent") is None
    ids = torch.tensor(json.loads((folder / "ids.json").read_text()))
    answers = {}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(folder / name, trust_remote_code=True)
        stack = AutoModel.from_pretrained(folder / name, trust_remote_code=True)
        answers[name] = {
            "texts": {mode: text(model, ids, mode) for mode in ("standard", "soft", "fused", None)},
            "loss": model(ids, labels=ids, num_passes=3).loss.item(),
            "states": stack(ids).last_hidden_state.double().sum().item(),
        }
        model.save_pretrained(folder / f"{name}-again")
        if name == "plain":
            modes = ("standard", "soft")
            answers["compiled"] = {mode: compiled(model, ids, mode) for mode in modes}
    print(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
