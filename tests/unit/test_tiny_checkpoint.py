"""``soak engine make-tiny``: files, bytes, sizes, template, tokenizer, routing and text, without any vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from soakrig.cli.main import invoke
from soakrig.engine.vllm.tiny import make_tiny
from soakrig.engine.vllm.tiny_spec import FAMILIES, TinySpec
from soakrig.engine.vllm.tiny_tokenizer import TinyTokenizer, chat_template, train_tokenizer
from soakrig.errors import UsageError
from soakrig.soak.agent.tools import tools
from soakrig.soak.degenerate import why_degenerate
from tiny_reference import Reference

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
REPLY = 300
OUTPUT_OF_SEED_0 = [0.123046875, 0.004180908203125, 0.021728515625]
ROUTER_OF_SEED_0 = [-1.796875, -1.2578125, -1.1953125]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        make_tiny(root / family, TinySpec(family=family))
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="module")
def tokenizer() -> TinyTokenizer:
    return train_tokenizer()


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def words(tokenizer: TinyTokenizer, count: int, length: int) -> list[list[int]]:
    """Prompts of random words between the tokens that a chat puts around them."""
    rng, control = Random(1), tokenizer.control
    head, tail = [control["begin"], control["user"]], [control["end"], control["assistant"]]
    return [[*head, *rng.choices(tokenizer.word_ids, k=length), *tail] for _ in range(count)]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_file_is_there_and_fits_the_others(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    config = json.loads((folder / "config.json").read_text())
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tensors = load_file(folder / "model.safetensors")
    assert config["vocab_size"] == vocabulary.get_vocab_size() == tensors["lm_head.weight"].shape[0] == 2048
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == vocabulary.token_to_id("<|end|>")
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10_000_000
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_the_tensors_have_the_shapes_that_the_options_name(tmp_path: Path) -> None:
    spec = TinySpec(family="glm4-moe", layers=2, experts=16, top_k=2, hidden=64, dtype="float32")
    made = make_tiny(tmp_path / "m", spec)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["first_k_dense_replace"], config["n_shared_experts"]) == (3, 1, 1)
    assert tensors["model.layers.2.mlp.experts.15.down_proj.weight"].shape == (64, 32)
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].shape == (16,)
    assert tensors["model.layers.0.mlp.up_proj.weight"].shape == (128, 64)
    assert "model.layers.0.mlp.gate.weight" not in tensors
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in tensors
    assert "model.layers.2.mlp.experts.16.up_proj.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert made["parameters"] == sum(tensor.numel() for tensor in tensors.values())


def test_a_seed_means_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    family = folder.name
    make_tiny(tmp_path / "same", TinySpec(family=family))
    assert bytes_of(tmp_path / "same") == bytes_of(folder)
    make_tiny(tmp_path / "other", TinySpec(family=family, seed=1))
    differ = {name for name, data in bytes_of(tmp_path / "other").items() if data != bytes_of(folder)[name]}
    assert differ == {"model.safetensors"}


def test_the_numbers_of_seed_0_stay(folders: dict[str, Path]) -> None:
    """They are part of what a seed means: on every machine, and from one release to the next."""
    tensors = load_file(folders["qwen3-moe"] / "model.safetensors")
    drawn = tensors["model.layers.0.self_attn.o_proj.weight"][100, 33:36].tolist()
    assert drawn == OUTPUT_OF_SEED_0
    router = tensors["model.layers.3.mlp.gate.weight"][:3, 0].tolist()
    assert router == ROUTER_OF_SEED_0


@pytest.mark.parametrize("length", [40, 400])
def test_a_quarter_of_the_experts_gets_most_of_the_work_in_each_layer(
    folder: Path, tokenizer: TinyTokenizer, length: int
) -> None:
    model = Reference(folder)
    with torch.inference_mode():
        model.forward(torch.tensor(words(tokenizer, 8, length)))
    assert len(model.routed) == 4
    hottest: list[tuple[int, ...]] = []
    bias_name = "e_score_correction_bias" if model.is_glm else "weight"
    for layer, counts in model.routed.items():
        ordered = counts.sort(descending=True)
        share = float(ordered.values[: len(counts) // 4].sum() / counts.sum())
        assert 0.5 <= share <= 0.8
        bias = model.weights[f"model.layers.{layer}.mlp.gate.{bias_name}"].view(len(counts), -1)[:, 0]
        assert int(bias.argmax()) in ordered.indices[:4]  # hot by the router's bias, not by the prompts' luck
        hottest.append(tuple(ordered.indices[:4].tolist()))
    assert len(set(hottest)) == 4  # each layer has its own


def greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def endless(logits: Tensor) -> Tensor:
    """Greedy with the end ruled out, as ``min_tokens`` does."""
    return logits.index_fill(-1, torch.tensor([2]), -torch.inf).argmax(-1)


def sampler() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda logits: torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("choose", [greedy, endless, sampler()], ids=["greedy", "endless", "sampled"])
def test_text_is_plain_words_without_cycles_and_ends(
    folder: Path, tokenizer: TinyTokenizer, choose: Callable[[Tensor], Tensor]
) -> None:
    end, allowed = tokenizer.control["end"], {*tokenizer.word_ids, tokenizer.control["end"]}
    replies = Reference(folder).generate(words(tokenizer, 20, 40), REPLY, choose)
    assert {token for reply in replies for token in reply} <= allowed
    # Past the end, too: that is what `ignore_eos` asks for.
    assert [why for reply in replies if (why := why_degenerate(tokenizer.tokenizer.decode(reply)))] == []
    assert min(len(set(reply)) for reply in replies) > 150
    lengths = sorted(reply.index(end) if end in reply else REPLY for reply in replies)
    if choose is endless:
        assert lengths[0] == REPLY
    else:
        assert lengths[0] >= 10
        assert 30 <= lengths[10] <= 120
        assert lengths[16] < REPLY


def test_the_reply_depends_on_every_expert_and_on_words_far_back(folder: Path, tokenizer: TinyTokenizer) -> None:
    (prompt,) = words(tokenizer, 1, 200)
    model = Reference(folder)
    with torch.inference_mode():
        before = model.forward(torch.tensor([prompt]))
        changed = model.forward(torch.tensor([[*prompt[:20], tokenizer.word_ids[5], *prompt[21:]]]))
        assert (changed - before)[0, -1].abs().max() > 0.05
        for layer, counts in model.routed.items():
            model.bank[layer, "down"][int(counts.argmax())].zero_()
        without = model.forward(torch.tensor([prompt]))
    assert (without - before)[0, -1].abs().max() > 0.5


# -- tokenizer and template ------------------------------------------------------------------------------------------


@given(text=st.text(max_size=60))
def test_text_goes_through_the_tokenizer_and_back(text: str) -> None:
    trained = Tokenizer.from_str(TRAINED)
    ids = trained.encode(text, add_special_tokens=False).ids
    assert trained.decode(ids, skip_special_tokens=False) == text


TRAINED = train_tokenizer().to_json()


def test_special_tokens_have_ids_of_their_own(folder: Path, tokenizer: TinyTokenizer) -> None:
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert loaded.encode("a").ids[0] == tokenizer.control["begin"]
    for number in tokenizer.special_ids:
        spelling = loaded.id_to_token(number)
        assert spelling is not None
        assert loaded.encode(spelling, add_special_tokens=False).ids == [number]
    markup = loaded.encode("<think>a</think><tool_call>", add_special_tokens=False).ids
    assert loaded.decode(markup, skip_special_tokens=True) == "<think>a</think><tool_call>"
    assert loaded.decode([tokenizer.control["end"]], skip_special_tokens=True) == ""
    assert len(loaded.encode(json.dumps(tools(50))).ids) < 8000


def render(messages: list[dict[str, Any]], **more: Any) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # as transformers has it
    return environment.from_string(chat_template()).render(messages=messages, bos_token="<|begin|>", **more)


CALL = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": {"path": "a.py"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": None, "reasoning": "Which file?", "tool_calls": [CALL]},
    {"role": "tool", "content": "x = 1 < 2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "Done."},
]


def test_the_template_renders_tools_calls_results_and_thinking() -> None:
    text = render(TALK, tools=tools(2), add_generation_prompt=True)
    assert text.startswith("<|begin|><|system|>Be brief.\n\n# Tools\n")
    assert "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools(2)) in text
    assert text.endswith(
        "<|end|>\n<|user|>Look.<|end|>\n<|assistant|><think>Which file?</think>"
        '<tool_call>{"name": "read_file", "arguments": {"path": "a.py"}}</tool_call><|end|>\n'
        "<|tool|>x = 1 < 2<|end|>\n<|assistant|>Done.<|end|>\n<|assistant|>"
    )


def test_arguments_given_as_text_are_written_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    text = render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert text == '<|begin|><|assistant|><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|end|>\n'


@pytest.mark.parametrize("more", [{}, {"enable_thinking": False}, {"tools": tools(3)}])
def test_a_longer_conversation_begins_with_the_shorter_one(more: dict[str, Any]) -> None:
    for length in (2, 4):
        shorter = render(TALK[:length], add_generation_prompt=True, **more)
        assert render(TALK, **more).startswith(shorter) or (TALK[length].get("reasoning") and "enable_thinking" in more)


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "model"
    assert invoke(["engine", "make-tiny", str(target), "--experts", "16", "--layers", "1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["experts"] == 16
    assert made["files"] == {path.name: path.stat().st_size for path in target.iterdir()}
    assert invoke(["engine", "make-tiny", str(target)]) == 64
    assert "is not empty" in capsys.readouterr().err
    (target / "notes.txt").write_text("mine")
    assert invoke(["engine", "make-tiny", str(target), "--layers", "1", "--force"]) == 0
    assert json.loads((target / "config.json").read_text())["num_experts"] == 32
    assert (target / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"family": "mixtral"}, ["mixtral", "qwen3-moe or glm4-moe"]),
        ({"dtype": "float16"}, ["float16", "bfloat16 or float32"]),
        ({"top_k": 9, "experts": 8}, ["--top-k 9", "8 of --experts"]),
        ({"top_k": 0}, ["--top-k 0", "at least 1"]),
        ({"layers": 0}, ["--layers 0", "at least 1"]),
        ({"hidden": 100}, ["--hidden 100", "a multiple of 64"]),
        ({"hidden": 0}, ["--hidden 0", "a multiple of 64"]),
        ({"seed": -1}, ["--seed -1", "0 to 2^30 - 1"]),
    ],
)
def test_sizes_that_make_no_model_are_refused(options: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        TinySpec(**options)
    assert all(fact in caught.value.message for fact in facts)


def test_a_folder_that_cannot_take_it_is_refused(tmp_path: Path) -> None:
    spec = TinySpec(layers=1, experts=4)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no folder to write to"):
        make_tiny(tmp_path / "file", spec)
    with pytest.raises(UsageError, match=r"cannot be written|no folder"):
        make_tiny(tmp_path / "file" / "below", spec)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model-00001-of-00002.safetensors").write_text("")
    with pytest.raises(UsageError, match=r"model-00001-of-00002\.safetensors"):
        make_tiny(tmp_path / "other", spec, force=True)
