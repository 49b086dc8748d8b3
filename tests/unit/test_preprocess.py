"""tools/preprocess_documents.py: what goes in comes out of Megatron's dataset, whoever tokenizes it."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
indexed_dataset = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed"
)

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_documents.py"
TEXTS = {
    "a.txt": "one document\n\twith a tab, two  spaces and 12345\r\n",
    "b.txt": "def f(x):\n    return x  # comment\n" * 9,
    "deep/c.txt": "naïve café 日本語 ∑ \N{GRINNING FACE}\n",
    "deep/d.txt": " starts with a space and has no newline at its end",
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preprocess_documents", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["preprocess_documents"] = module  # its dataclasses and its workers look it up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


@pytest.fixture(scope="module")
def model(tool: ModuleType, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("model") / "words"
    tool.main(
        ["--folder", str(folder), "--train-tokenizer", "--vocab-size", "330", "--output-prefix", str(prefix)]
    )
    return prefix.with_name("words.model")


def documents(prefix: Path, model: Path) -> list[str]:
    """Read PREFIX back with Megatron's reader; check that each document ends, and only ends, with the EOD."""
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(model))
    dataset = indexed_dataset.IndexedDataset(str(prefix))
    np.testing.assert_array_equal(dataset.document_indices, np.arange(len(dataset) + 1))
    texts = []
    for i in range(len(dataset)):
        ids = dataset[i].tolist()
        assert ids.index(tokenizer.eos_id()) == len(ids) - 1
        texts.append(tokenizer.decode(ids[:-1]))
    return texts


def test_a_folder_comes_back_word_for_word_in_the_order_of_its_paths(tool, folder, model, tmp_path):
    out = tmp_path / "out"
    assert (
        tool.main(["--folder", str(folder), "--tokenizer-model", str(model), "--output-prefix", str(out)])
        == 0
    )
    assert documents(out, model) == list(TEXTS.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx"]


def test_a_glob_chooses_the_files(tool, folder, model, tmp_path):
    flags = ["--folder", str(folder), "--glob", "deep/*.txt", "a*", "--tokenizer-model", str(model)]
    tool.main([*flags, "--output-prefix", str(tmp_path / "out")])
    assert documents(tmp_path / "out", model) == [
        TEXTS[name] for name in ("a.txt", "deep/c.txt", "deep/d.txt")
    ]


def test_a_jsonl_gives_a_document_a_line(tool, model, tmp_path):
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in TEXTS.values()))
    flags = ["--jsonl", str(lines), "--json-key", "body", "--tokenizer-model", str(model)]
    assert tool.main([*flags, "--output-prefix", str(tmp_path / "out")]) == 0
    assert documents(tmp_path / "out", model) == list(TEXTS.values())


def test_two_workers_write_the_same_bytes_as_one(tool, model, tmp_path):
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": f"line {i} " * (i % 7 + 1)}) + "\n" for i in range(100)))
    for workers in ("1", "2"):
        flags = ["--jsonl", str(lines), "--tokenizer-model", str(model), "--workers", workers]
        tool.main([*flags, "--output-prefix", str(tmp_path / workers)])
    for kind in ("bin", "idx"):
        assert (tmp_path / f"1.{kind}").read_bytes() == (tmp_path / f"2.{kind}").read_bytes()


def test_training_the_tokenizer_twice_gives_the_same_model(tool, folder, model, tmp_path):
    flags = ["--folder", str(folder), "--train-tokenizer", "--vocab-size", "330"]
    tool.main([*flags, "--output-prefix", str(tmp_path / "again")])
    assert (tmp_path / "again.model").read_bytes() == model.read_bytes()


BAD = {
    1: (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
    2: (b'{"text": " \\n"}', "empty"),
    3: (b"", "empty"),
    4: (b'{"text": ', "not JSON"),
    5: (b'{"body": "x"}', "has no 'text'"),
    6: (b'{"text": 7}', "its 'text' is no text"),
    7: (b"[1]", "has no 'text'"),
}


@pytest.fixture
def with_bad_lines(tmp_path: Path) -> Path:
    path = tmp_path / "bad.jsonl"
    lines = [b'{"text": "good"}', *(line for line, _ in BAD.values()), b'{"text": "also good"}']
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_records_are_named_and_skipped(tool, model, with_bad_lines, tmp_path, capsys, workers):
    flags = ["--jsonl", str(with_bad_lines), "--tokenizer-model", str(model), "--workers", workers]
    assert tool.main([*flags, "--output-prefix", str(tmp_path / "out")]) == len(BAD)
    printed = capsys.readouterr().out
    for number, (_, problem) in BAD.items():
        assert f"{with_bad_lines}:{number + 1}: {problem}" in printed
    assert f"skipped {len(BAD)} bad records" in printed
    assert documents(tmp_path / "out", model) == ["good", "also good"]


def test_a_bad_record_can_be_fatal_and_then_nothing_is_written(tool, model, with_bad_lines, tmp_path):
    flags = ["--jsonl", str(with_bad_lines), "--tokenizer-model", str(model), "--on-error", "fail"]
    with pytest.raises(SystemExit, match=r"bad\.jsonl:2: not UTF-8 at byte 10\. Nothing was written"):
        tool.main([*flags, "--output-prefix", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == [with_bad_lines]


def test_a_new_dataset_takes_megatrons_index_of_the_old_one_away(tool, folder, model, tmp_path):
    stale = tmp_path / "out" / "cache" / "GPTDataset_indices" / "old.npy"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    flags = ["--folder", str(folder), "--tokenizer-model", str(model)]
    tool.main([*flags, "--output-prefix", str(tmp_path / "out")])
    assert not stale.exists()


@pytest.mark.parametrize(
    ("limit", "count"),
    [(["--max-documents", "2"], 2), (["--max-bytes", "60"], 1), (["--max-bytes", "9999"], 4)],
)
def test_limits_take_the_first_documents(tool, folder, model, tmp_path, limit, count):
    flags = ["--folder", str(folder), "--tokenizer-model", str(model), *limit]
    tool.main([*flags, "--output-prefix", str(tmp_path / "out")])
    assert documents(tmp_path / "out", model) == list(TEXTS.values())[:count]


def test_the_standard_library_is_a_corpus_without_its_tests(tool):
    args = tool.build_parser().parse_args(["--stdlib", "--train-tokenizer", "--output-prefix", "x"])
    names = [record.path.parts for record in tool.find_records(args)]
    assert len(names) > 300
    assert any(parts[-1] == "argparse.py" for parts in names)
    assert not any({"site-packages", "test"} & set(parts[-4:]) for parts in names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokenizer-model", "x"], "name some documents"),
        (["--stdlib", "--tokenizer-model", "/no/such"], "/no/such is not a file"),
        (["--stdlib"], "one of the arguments --tokenizer-model --train-tokenizer is required"),
        (["--folder", "/no/such", "--train-tokenizer"], "/no/such is not a folder"),
        (["--jsonl", "/no/such", "--train-tokenizer"], "/no/such is not a file"),
        (
            ["--stdlib", "--max-documents", "1", "--train-tokenizer", "--vocab-size", "99999"],
            "no tokenizer of 99999",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(flags, message, tmp_path):
    command = [sys.executable, str(TOOL), *flags, "--output-prefix", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_histogram_counts_by_powers_of_two(tool):
    rows = tool.histogram([1, 2, 3, 4, 9]).splitlines()
    assert [row.split("tokens")[1].split()[0] for row in rows] == ["1", "2", "1", "1"]


LINES = [{"text": f"line {i} " * (i % 7 + 1)} for i in range(40)]


def packed(kind: str, folder: Path) -> list[str]:
    """Write LINES in one of the forms; give the flags that read it."""
    plain = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    if kind == "jsonl":
        (folder / "in.jsonl").write_bytes(plain)
        return ["--jsonl", str(folder / "in.jsonl")]
    if kind == "gz":
        (folder / "in.jsonl.gz").write_bytes(gzip.compress(plain))
        return ["--jsonl", str(folder / "in.jsonl.gz")]
    if kind == "zst":
        zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
        (folder / "in.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(plain))
        return ["--jsonl", str(folder / "in.jsonl.zst")]
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        table = pyarrow.table({"number": range(len(LINES)), "text": [line["text"] for line in LINES]})
        parquet.write_table(table, folder / "in.parquet")
        return ["--parquet", str(folder / "in.parquet")]
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    datasets.Dataset.from_list(LINES).save_to_disk(str(folder / "saved"))
    return ["--dataset", str(folder / "saved")]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("kind", ["gz", "zst", "parquet", "datasets"])
def test_every_form_of_the_same_documents_gives_the_same_bytes(tool, model, tmp_path, kind, workers):
    flags = ["--tokenizer-model", str(model), "--workers", workers]
    for form in ("jsonl", kind):
        tool.main([*packed(form, tmp_path), *flags, "--output-prefix", str(tmp_path / form)])
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"jsonl.{suffix}").read_bytes() == (tmp_path / f"{kind}.{suffix}").read_bytes()


def test_a_tokenizer_json_is_taken_with_the_token_that_ends_a_document(tool, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="Hugging Face's tokenizers is not installed")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<end>": 1, "line": 2}, "<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    flags = [*packed("jsonl", tmp_path), "--tokenizer-model", str(tmp_path / "tokenizer.json")]
    tool.main([*flags, "--eod-token", "<end>", "--output-prefix", str(tmp_path / "out")])
    dataset = indexed_dataset.IndexedDataset(str(tmp_path / "out"))  # kept: its items are views of its memory
    assert dataset[1].tolist() == [2, 0, 2, 0, 1]
    with pytest.raises(SystemExit, match="which token ends a document"):
        tool.main([*flags, "--output-prefix", str(tmp_path / "none")])


@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet"])
def test_a_record_that_is_too_long_is_a_bad_one(tool, model, tmp_path, capsys, kind):
    limit = ["--max-record-bytes", "40", "--tokenizer-model", str(model)]
    bad = tool.main([*packed(kind, tmp_path), *limit, "--output-prefix", str(tmp_path / "out")])
    assert 0 < bad < len(LINES) and "and 40 are allowed" in capsys.readouterr().out
    assert len(documents(tmp_path / "out", model)) == len(LINES) - bad


def test_a_compressed_file_that_is_cut_off_is_refused(tool, model, tmp_path):
    flags = packed("gz", tmp_path)
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SystemExit, match="is no whole gzip file"):
        tool.main([*flags, "--tokenizer-model", str(model), "--output-prefix", str(tmp_path / "out")])
    assert not (tmp_path / "out.bin").exists()


def start(lines: Path, model: Path, prefix: Path, workers: int) -> subprocess.Popen[str]:
    flags = ["--jsonl", str(lines), "--tokenizer-model", str(model), "--workers", str(workers)]
    command = [sys.executable, str(TOOL), *flags, "--output-prefix", str(prefix)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_killed_run_goes_on_where_it_stood_and_ends_with_the_same_bytes(model, tmp_path):
    lines = tmp_path / "many.jsonl"
    lines.write_text("".join(json.dumps({"text": f"line {i} " * (i % 40 + 1)}) + "\n" for i in range(35_000)))
    killed = start(lines, model, tmp_path / "out", 1)
    deadline = time.monotonic() + 120
    while not (tmp_path / "out.parts" / "000000.json").exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "out.bin").exists()
    again = start(lines, model, tmp_path / "out", 2)
    assert "went on after" in again.communicate(timeout=120)[0] and again.returncode == 0
    whole = start(lines, model, tmp_path / "whole", 1)
    assert "went on" not in whole.communicate(timeout=120)[0]
    for kind in ("bin", "idx"):
        assert (tmp_path / f"out.{kind}").read_bytes() == (tmp_path / f"whole.{kind}").read_bytes()
    assert not (tmp_path / "out.parts").exists()


def test_parts_of_another_input_are_not_gone_on_with(tool, model, tmp_path, capsys):
    lines = tmp_path / "many.jsonl"
    lines.write_text("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(10)))
    stale = tmp_path / "out.parts"
    stale.mkdir()
    (stale / "made_from").write_text("something else")
    (stale / "000000.json").write_text("{}")
    flags = ["--jsonl", str(lines), "--tokenizer-model", str(model)]
    assert tool.main([*flags, "--output-prefix", str(tmp_path / "out")]) == 0
    assert "went on" not in capsys.readouterr().out
    assert documents(tmp_path / "out", model) == [f"{i}" for i in range(10)]
