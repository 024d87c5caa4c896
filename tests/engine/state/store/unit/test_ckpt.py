"""`holdfast ckpt`: what people and scripts see of checkpoints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.cli.main import main
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.manifest import CHUNK_BYTES, encode, manifest_name
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.state.store.saving import Item

safetensors = pytest.importorskip("safetensors.torch")

TENSORS = {
    "model.weight": torch.arange(CHUNK_BYTES, dtype=torch.float32).reshape(1024, -1),
    "model.low": torch.ones(3, 5, dtype=torch.bfloat16),
    "model.scalar": torch.tensor(7),
    "model.none": torch.empty(0, 4),
}


def save(store: str, step: int, tensors: dict[str, torch.Tensor] | None = None) -> None:
    items = [
        Item(
            name=name,
            data=tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
        )
        for name, tensor in (tensors or TENSORS).items()
    ]
    items.append(Item(name="skeleton", data=memoryview(b"plain bytes")))
    Checkpoints(open_storage(store)).save(step, items, {"job": "abc"})


@pytest.fixture
def store(tmp_path: Path) -> str:
    found = str(tmp_path / "store")
    save(found, 10)
    changed = dict(TENSORS)
    changed["model.weight"] = TENSORS["model.weight"].clone()
    changed["model.weight"][0, 0] = -1
    save(found, 20, changed)
    return found


def run(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(["ckpt", *args]) == code
    found = capsys.readouterr()
    assert "Traceback" not in found.err
    return found.out + found.err


@pytest.mark.parametrize(
    "command", [["list"], ["list", "--json"], ["show"], ["verify"], ["repair"], ["gc"]]
)
def test_a_folder_that_does_not_exist_is_named(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command
    where = str(tmp_path / "nowhere")
    assert "no such folder" in (said := run(capsys, name, where, *options, code=2))
    assert where in said
    coded = f"ec:1+1:{where}/a,{where}/b"
    assert "none of these folders" in run(capsys, name, coded, *options, code=2)
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_has_no_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no checkpoints" in run(capsys, "list", str(tmp_path))
    for command in (["verify"], ["verify", "--json"], ["show"], ["diff", "1", "2"]):
        name, *options = command
        assert "no checkpoints" in run(capsys, name, str(tmp_path), *options, code=2)
    for volume in ("a", "b"):
        (tmp_path / volume).mkdir()
    coded = f"ec:1+1:{tmp_path}/a,{tmp_path}/b"
    assert "nothing to repair" in run(capsys, "repair", coded, code=2)


@pytest.mark.parametrize("option", [["verify", "--rate"], ["gc", "--keep-age-s"]])
def test_a_number_that_is_none_is_refused(
    option: list[str], store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, name = option
    assert name in run(capsys, command, store, name, "nan", code=2)


def rewrite(store: str, step: int, **changes: Any) -> None:
    """Change a manifest as another program might, with a right digest; `entry`: its first entry."""
    storage = open_storage(store)
    found = Checkpoints(storage).manifest(step)
    first = dataclasses.replace(found.entries[0], **changes.pop("entry", {}))
    changed = dataclasses.replace(found, entries=(first, *found.entries[1:]), **changes)
    storage.put(manifest_name(step), [encode(changed)])


@pytest.mark.parametrize("dtype", ["float7", "load", "qint32", "\x1b[31mfloat32", "float8_e5m2"])
def test_a_type_that_is_not_known_is_named(
    dtype: str, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one is a known type, but the tensor has too many bytes for it."""
    rewrite(store, 20, entry={"dtype": dtype})
    words = f"'model.weight' is of {dtype!r}, which this PyTorch does not know"
    assert words in run(capsys, "verify", store, "20", code=1)
    assert words in run(capsys, "export", store, "20", f"{store}.file", code=2)
    assert "\x1b" not in run(capsys, "show", store, "20")


@pytest.mark.parametrize(
    "changes",
    [
        {"time": float("nan")},
        {"time": float("inf")},
        {"time": -1e18},
        {"about": {"view": "9" * 10_000, "x": "[/red]"}},
        {"about": {"view": "\x1b[2J"}},
        {"entry": {"name": "[/red] \x1b]0;x\x07"}},
    ],
)
def test_odd_texts_and_numbers_are_shown_without_their_effect(
    changes: dict[str, Any], store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(store, 20, **changes)
    for command in (["list"], ["show", "20"], ["verify"], ["diff", "20", "20"], ["gc"]):
        name, *options = command
        shown = run(capsys, name, store, *options)
        assert all(each.isprintable() for each in shown.replace("\n", ""))


def test_one_odd_checkpoint_does_not_hide_the_others(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(store, 20, packs=("../../etc/passwd",))
    with open(Path(store) / manifest_name(30), "wb") as file:
        file.truncate(1 << 41)
    shown = run(capsys, "verify", store, code=1)
    assert "step 10: every byte is right" in shown
    assert "'../../etc/passwd' is no name of a pack" in shown
    assert "more than the 1073741824 that can be right" in shown
    assert json.loads(run(capsys, "list", store, "--json", code=1))[0]["damage"] == ""


def flip(path: Path, at: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_list_and_show_describe_checkpoints(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, "list", store, "--json"))
    assert [(r["step"], r["entries"], r["about"]) for r in rows] == [
        (10, 5, {"job": "abc"}),
        (20, 5, {"job": "abc"}),
    ]
    assert rows[1]["written_bytes"] == CHUNK_BYTES
    text = run(capsys, "list", store)
    assert "4.0 MiB" in text
    assert "job=abc" in text
    text = run(capsys, "show", store)
    assert "step 20" in text
    assert "bfloat16" in text
    entries = json.loads(run(capsys, "show", store, "10", "--json"))["entries"]
    assert entries[0] == {
        "name": "model.weight",
        "dtype": "float32",
        "shape": [1024, 1024],
        "bytes": 4 << 20,
    }


def test_verify_finds_a_flipped_bit(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "step 10: every byte is right" in run(capsys, "verify", store)
    (pack,) = Path(store, "packs").glob("000000000020-*")
    flip(pack)
    text = run(capsys, "verify", store, code=1)
    assert "step 10: every byte is right" in text
    assert "step 20: 1 damaged" in text
    assert "bytes 0 to 1048576 of model.weight" in text
    (good, bad) = json.loads(run(capsys, "verify", store, "--rate", "900", "--json", code=1))
    assert good == {"step": 10, "damage": []}
    assert len(bad["damage"]) == 1
    flip(Path(store, "manifests", f"{20:012d}"), at=30)
    assert "digest is another" in run(capsys, "list", store, code=1)
    assert "is damaged" in run(capsys, "show", store, "20", code=1)


def test_diff_names_what_changed(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "diff", store, "10", "20", code=1)
    assert "changed  model.weight: 1 of 4 chunks" in text
    assert "4 entries are equal" in text
    assert "5 entries are equal" in run(capsys, "diff", store, "10", "10")
    save(store, 30, {"model.low": torch.ones(3, 6, dtype=torch.bfloat16), "new": torch.ones(1)})
    found = json.loads(run(capsys, "diff", store, "10", "30", "--json", code=1))
    assert found["added"] == ["new"]
    assert found["changed"] == ["model.low"]
    assert "model.weight" in found["removed"]


def load_dcp(folder: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


HUGGING = ["export", "STORE", "10", "x", "--format", "huggingface"]
LOADERS = {"safetensors": safetensors.load_file, "torch": torch.load, "dcp": load_dcp}


@pytest.mark.parametrize("kind", LOADERS)
def test_exported_files_keep_every_bit(
    kind: str, store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "export", store, "10", str(tmp_path / "out"), "--format", kind)
    found = LOADERS[kind](tmp_path / "out")
    assert sorted(found) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_part_is_exported_and_imported(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out"
    run(capsys, "export", store, "10", str(file), "--only", "low")
    assert list(safetensors.load_file(file)) == ["model.low"]
    run(capsys, "import", store, str(file), "--step", "7")
    assert json.loads(run(capsys, "list", store, "--json"))[0]["step"] == 7


def original(folder: Path) -> str:
    """Make a folder with files to be copied, and with files of weights."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "merges.txt", "model.safetensors"):
        (folder / name).write_text(name)
    (folder / "model.safetensors.index.json").write_text("{}")
    return str(folder)


def test_a_folder_of_hugging_face_has_shards_and_the_files_beside(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = ["export", store, "10", "--format", "huggingface"]
    export += ["--beside", original(tmp_path / "from")]
    one, two = tmp_path / "one", tmp_path / "two"
    run(capsys, *export, str(one))
    beside = ["config.json", "merges.txt", "tokenizer.json"]
    assert sorted(p.name for p in one.iterdir()) == sorted([*beside, "model.safetensors"])
    run(capsys, *export, str(two), "--max-shard-size", "1KB")
    index = json.loads((two / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert {p.name for p in two.iterdir()} == {*beside, *files, "model.safetensors.index.json"}
    for folder, shards in ((one, ["model.safetensors"]), (two, files)):
        found = {}
        for file in shards:
            found |= safetensors.load_file(folder / file)
        assert {f"model.{name}": tensor.tolist() for name, tensor in found.items()} == {
            name: tensor.tolist() for name, tensor in TENSORS.items()
        }
    assert {index["weight_map"][name] for name in ("low", "scalar", "none")} == {files[1]}


@pytest.mark.slow
def test_from_pretrained_loads_what_was_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    config.save_pretrained(tmp_path / "from")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "from")
    weights = model.state_dict()
    others = {"optimizer.state.0.exp_avg": torch.ones(3), "trainer.best.model.x": torch.ones(3)}
    save(str(tmp_path / "store"), 7, {f"model.{n}": t for n, t in weights.items()} | others)
    out = str(tmp_path / "out")
    options = ["--beside", str(tmp_path / "from"), "--max-shard-size", "0.005MB"]
    run(capsys, "export", str(tmp_path / "store"), "7", out, "--format", "huggingface", *options)
    load = transformers.AutoModelForCausalLM.from_pretrained
    found, problems = load(out, output_loading_info=True, local_files_only=True)
    assert not any(problems.values()), problems
    assert all(torch.equal(found.state_dict()[name], weights[name]) for name in weights)
    assert transformers.AutoTokenizer.from_pretrained(out)("a b a")["input_ids"] == [0, 1, 0]


def test_repair_of_volumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyeclib")
    volumes = [tmp_path / name for name in "abc"]
    store = "ec:2+1:" + ",".join(map(str, volumes))
    save(store, 1)
    for path in [p for p in volumes[1].rglob("*") if p.is_file()]:
        path.unlink()
    assert "every byte is right" in run(capsys, "verify", store)
    assert "2 objects, 2 repairs" in run(capsys, "repair", store)
    assert "2 objects, 0 repairs" in run(capsys, "repair", store)


def test_gc(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "removed no checkpoint, and 0 packs" in run(capsys, "gc", store)
    assert "removed checkpoints of steps 10" in run(capsys, "gc", store, "--keep-last", "1")
    assert "every byte is right" in run(capsys, "verify", store)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["show", "STORE", "99"], ["no checkpoint of step 99", "10, 20"]),
        (["show", "."], ["there are no checkpoints"]),
        (["verify", "STORE", "--rate", "0"], ["--rate 0"]),
        (["repair", "STORE"], ["no parity"]),
        (["gc", "STORE", "--keep-last", "-1"], ["--keep-last"]),
        (["export", "STORE", "10", "/nowhere/x"], ["/nowhere/x"]),
        (["export", "STORE", "10", "/proc/none/x", "--format", "dcp"], ["/proc/none/x"]),
        (["export", "STORE", "10", "x", "--only", "zzz"], ["'zzz'"]),
        (["export", "STORE", "10", "x", "--prefix", "zzz"], ["'zzz'"]),
        ([*HUGGING], ["--beside"]),
        ([*HUGGING, "--beside", "nowhere"], ["nowhere has no config.json"]),
        ([*HUGGING, "--beside", "x", "--max-shard-size", "5XB"], ["5XB", "200MB"]),
        ([*HUGGING, "--beside", "x", "--max-shard-size", "0"], ["'0'"]),
        (["import", "STORE", "STORE"], ["no safetensors file"]),
        (["import", "STORE", "x", "--step", "10"], ["step 10 already"]),
        (["list", "ec:4+2:a"], ["need 6 volumes"]),
    ],
)
def test_bad_arguments(
    args: list[str],
    words: list[str],
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = run(capsys, *[store if a == "STORE" else a for a in args], code=2)
    (line,) = [line for line in text.splitlines() if line.startswith("holdfast")]
    assert all(word in line for word in words), line
