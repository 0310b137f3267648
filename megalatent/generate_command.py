"""`megalatent generate`: text from a Hugging Face export, in one decoding mode or all three."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalatent.errors import UserError

if TYPE_CHECKING:
    import torch

__all__ = ["Sample", "add_generate_parser", "run_generate_command"]

_MODES = ("standard", "soft", "fused")  # decoding_megalatent.MODES, without importing torch
_COLDEST = 1e-6  # below, a logit divided by the temperature may be infinite
_DESCRIPTION = """\
Generate text with a Hugging Face export. Modes: standard reads and writes plain tokens; soft fuses
every generated token with the state of the position before; fused also reads the prompt a second
time, fused. The default mode is the export's (generation_config.json), else standard.
"""


@dataclass
class Sample:
    """One generated text.

    `log_probability` is the sum over the generated tokens (nats) under the model's own
    distribution in this mode, temperature and cut-offs aside; None when it was not asked for.
    """

    prompt: str
    mode: str
    prefill_passes: int
    text: str
    tokens: int
    log_probability: float | None


def add_generate_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `generate` to the subparsers of the `megalatent` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate",
        help="text from a Hugging Face export",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="folder of an export, or a hub name")
    what = parser.add_argument_group("prompts (any number of both)")
    what.add_argument("--prompt", action="append", default=[], metavar="TEXT")
    what.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="the whole file is one prompt; - reads standard input",
    )
    what.add_argument("--chat", action="store_true", help="wrap prompts in the chat template")
    how = parser.add_argument_group("decoding")
    how.add_argument("--mode", choices=_MODES)
    how.add_argument(
        "--prefill-passes",
        type=int,
        metavar="K",
        help="all passes over the prompt (soft 1, fused 2); with --compare those of fused",
    )
    how.add_argument("--compare", action="store_true", help="all three modes side by side")
    how.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    how.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    how.add_argument("--top-k", type=int, default=0, help="sample from the k best tokens alone")
    how.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling")
    how.add_argument("--num-beams", type=int, default=1, metavar="N")
    how.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string")
    how.add_argument("--seed", type=int, default=0)
    run = parser.add_argument_group("running and printing")
    run.add_argument("--device", help="default: cuda if there is one, else cpu")
    run.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16")
    run.add_argument("--stream", action="store_true", help="print the text as it is made")
    run.add_argument("--json", action="store_true", help="one JSON object a line for each text")
    return parser


def run_generate_command(args: argparse.Namespace) -> int:
    """Run `megalatent generate`; returns the exit code, 2 for mistakes of the user."""
    try:
        _check(args)
        prompts = _prompts(args)
        model, tokenizer = _load(args)
        modes = _MODES if args.compare else (args.mode,)
        for number, prompt in enumerate(prompts):
            samples = [_generate(model, tokenizer, prompt, mode, args) for mode in modes]
            _print(samples, args, number, len(prompts))
    except UserError as error:
        print(f"megalatent: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options that are out of range or contradict each other, before anything is loaded."""
    if not args.prompt and not args.prompt_file:
        raise UserError("there is no prompt: give --prompt TEXT or --prompt-file FILE.")
    if args.compare and args.mode:
        raise UserError(f"--compare runs all modes: leave --mode {args.mode} out.")
    if args.stream and (args.compare or args.json or args.num_beams > 1):
        raise UserError("--stream cannot go with --compare, --json or --num-beams.")
    for name, value, low in (
        ("--max-new-tokens", args.max_new_tokens, 1),
        ("--num-beams", args.num_beams, 1),
        ("--temperature", args.temperature, 0),
        ("--top-k", args.top_k, 0),
    ):
        if not low <= value < math.inf:  # not a number is neither
            raise UserError(f"{name} {value}: give at least {low}.")
    if 0 < args.temperature < _COLDEST:
        raise UserError(
            f"--temperature {args.temperature}: give 0, which is greedy, or at least {_COLDEST}."
        )
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed {args.seed}: give a number from 0 to 2^63 - 1.")
    if "" in args.stop:
        raise UserError("--stop '': every text contains it; give some text.")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p {args.top_p}: give a share above 0, at most 1.")


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    for name in args.prompt_file:
        try:
            prompts.append(sys.stdin.read() if name == "-" else Path(name).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt-file {name} cannot be read: {error}") from error
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"a prompt is no valid UTF-8 ({error.reason}): correct it.") from error
    return prompts


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer of an export."""
    folder = Path(args.model)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise UserError(
            f"{args.model} has no config.json: give a Hugging Face export, which `megalatent "
            "convert to-hf` makes from a checkpoint."
        )
    # Else it may be the name of a model on a hub.
    local = folder.exists() or folder.parent.is_dir() or args.model.count("/") != 1
    if not folder.is_dir() and local:
        raise UserError(f"{args.model} is not a folder: give a Hugging Face export.")
    try:
        import torch
        import transformers
        from huggingface_hub.errors import StrictDataclassError
        from safetensors import SafetensorError

        # Importing this also makes the Auto classes know the model.
        from megalatent.hf.quantized import is_quantized, load_quantized
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: install megalatent[hf].") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.dtype != "auto" and not isinstance(getattr(torch, args.dtype, None), torch.dtype):
        raise UserError(f"--dtype {args.dtype}: give auto, float32, bfloat16 or float16.")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = transformers.AutoConfig.from_pretrained(args.model)
        if config.model_type != "megalatent":
            raise UserError(
                f"{args.model} is a {config.model_type} model: import it first with `megalatent "
                "convert from-hf`, and export the result."
            )
        if is_quantized(folder):
            print("quantised weights are expanded to run here", file=sys.stderr)
            kind = None if args.dtype == "auto" else getattr(torch, args.dtype)
            return load_quantized(folder, kind).to(device), _tokenizer(args.model)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=args.dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        model.to(device)
    except UserError:
        raise
    except (
        OSError,
        ValueError,
        SafetensorError,
        StrictDataclassError,
        RuntimeError,
        AssertionError,  # of torch, for a device that it was built without
    ) as error:
        raise UserError(f"{args.model} cannot be loaded: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            names = ", ".join(sorted(str(name) for name in info[kind])[:3])
            raise UserError(
                f"{args.model} is incomplete or of another model: {kind.replace('_', ' ')} "
                f"{names} ({len(info[kind])} in all). Export it again."
            )
    return model.eval(), _tokenizer(args.model)


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # the tokenizers package raises no other kind
        raise UserError(f"the tokenizer of {model} cannot be loaded: {error}") from error


def _generate(
    model: Any, tokenizer: Any, prompt: str, mode: str | None, args: argparse.Namespace
) -> Sample:
    """One text in one mode; with --stream it is printed while it grows."""
    import torch
    from transformers import StopStringCriteria, TextStreamer

    decoding: dict[str, Any] = {"mode": mode}
    if args.prefill_passes is not None and not (args.compare and mode != "fused"):
        decoding["prefill_passes"] = args.prefill_passes
    try:
        plan = model.decoding_plan(None, decoding)
    except ValueError as error:
        raise UserError(str(error)) from error
    ids = _token_ids(tokenizer, prompt, args.chat).to(model.device)
    context = model.config.max_position_embeddings
    if ids.shape[1] + args.max_new_tokens > context:
        raise UserError(
            f"a prompt of {ids.shape[1]} tokens and --max-new-tokens {args.max_new_tokens} exceed "
            f"the model's context of {context}: shorten one of them."
        )
    sampling: dict[str, Any] = {"do_sample": args.temperature > 0}
    if args.temperature > 0:
        sampling |= {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    if args.stop:
        try:
            StopStringCriteria(tokenizer, args.stop)
        except ValueError as error:
            raise UserError(
                f"--stop cannot be used with the tokenizer of this model ({error}): leave it out."
            ) from error
        sampling |= {"stop_strings": args.stop, "tokenizer": tokenizer}
    if args.stream:
        sampling["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    want_probability = args.compare or args.json
    torch.manual_seed(args.seed)
    try:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.max_new_tokens,
            num_beams=args.num_beams,
            return_dict_in_generate=True,
            output_logits=want_probability,
            pad_token_id=_pad_token_id(model, tokenizer),
            **decoding,
            **sampling,
        )
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{model.device} is out of memory: give --dtype bfloat16, fewer --num-beams, a shorter"
            " prompt or --device cpu."
        ) from error
    tokens = out.sequences[0, ids.shape[1] :]
    return Sample(
        prompt=prompt,
        mode=plan.mode,
        prefill_passes=plan.prefill_passes,
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        tokens=len(tokens),
        log_probability=_log_probability(model, out) if want_probability else None,
    )


def _token_ids(tokenizer: Any, prompt: str, chat: bool) -> torch.Tensor:
    """The prompt as `[1, s]`."""
    import torch

    if chat:
        if not tokenizer.chat_template:
            raise UserError("--chat: the tokenizer of this model has no chat template.")
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise UserError("the prompt has no tokens: give some text.")
    return torch.tensor([ids])


def _pad_token_id(model: Any, tokenizer: Any) -> int:
    # Only rows that ended are padded, and one text is never padded: any token will do.
    ends = model.generation_config.eos_token_id
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, ends)
    return next((token for token in known if isinstance(token, int)), 0)


def _log_probability(model: Any, out: Any) -> float:
    """Sum of the log-probabilities of the generated tokens, from the raw logits of each step."""
    scores = model.compute_transition_scores(
        out.sequences, out.logits, getattr(out, "beam_indices", None), normalize_logits=True
    )
    return float(scores[0].double().sum())


def _print(samples: list[Sample], args: argparse.Namespace, number: int, prompts: int) -> None:
    if args.json:
        for sample in samples:
            print(json.dumps(asdict(sample), ensure_ascii=False))
    elif args.compare:
        _print_side_by_side(samples)
    elif not args.stream:
        if prompts > 1:
            print(f"--- prompt {number + 1} of {prompts}")
        print(samples[0].text)


def _print_side_by_side(samples: list[Sample]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    prompt = samples[0].prompt.strip().replace("\n", " ")
    table = Table(title=Text(prompt if len(prompt) <= 70 else f"{prompt[:67]}..."))
    table.add_column("mode", no_wrap=True)
    for sample in samples:
        table.add_column(sample.mode, ratio=1, overflow="fold")

    def add(name: str, values: list[str]) -> None:
        # Text: brackets in a generated text are no markup.
        table.add_row(name, *[Text(value) for value in values])

    add("prompt passes", [str(s.prefill_passes) for s in samples])
    add("tokens", [str(s.tokens) for s in samples])
    add("log-probability", [f"{s.log_probability:.3f}" for s in samples])
    per_token = [(s.log_probability or 0.0) / max(s.tokens, 1) for s in samples]
    add("per token", [f"{value:.4f}" for value in per_token])
    table.add_section()
    add("text", [s.text for s in samples])
    Console().print(table)
