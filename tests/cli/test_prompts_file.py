"""The file of --prompts-file and its results: reading prompts, writing in order, going on where a run ended."""

import io
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlx_paged.cli.prompts_file import Counts, Prompt, Results, read_prompts
from mlx_paged.errors import PromptsFileError

# Reading -----------------------------------------------------------------------------------------------------------


def read(lines: list[str], name: str = "file") -> list[Prompt]:
    return read_prompts([line.encode() for line in lines], name)


def test_one_prompt_a_line() -> None:
    prompts = read(["\ufefffirst line\n", "\n", '  "quoted" {x}\r\n', "[1, 2]\n", '{"prompt": 1}\n'])
    assert [p.text for p in prompts] == ["first line", '  "quoted" {x}', "[1, 2]", '{"prompt": 1}']
    assert [p.index for p in prompts] == [0, 1, 2, 3]


def test_json_lines() -> None:
    lines = [
        '{"prompt": "a", "id": 7}\n',
        "\n",
        '{"messages": [{"role": "user", "content": "b"}], "max_tokens": 3}\n',
        '{"prompt": "c", "messages": null, "temperature": 0.5, "logit_bias": {"3": 1}, "max_completion_tokens": 4}\n',
    ]
    first, second, third = read(lines)
    assert first == Prompt(0, "a", id=7)
    assert second == Prompt(1, None, ({"role": "user", "content": "b"},), 3)
    assert third == Prompt(2, "c", max_tokens=4, sampling={"temperature": 0.5, "logit_bias": {"3": 1}})


@pytest.mark.parametrize("lines", [[], ["\n", "  \n"]])
def test_a_file_without_prompts_is_refused(lines: list[str]) -> None:
    with pytest.raises(PromptsFileError, match="f holds no prompt"):
        read(lines, "f")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plain", "not valid JSON"),
        ('{"prompt": "cut', "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"prompt": "half \\ud800"}', "not UTF-8"),
        ('{"text": "a"}', "'text': not an option"),
        ('{"id": 3}', "exactly one of 'prompt' and 'messages'"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "exactly one"),
        ('{"prompt": 3}', "prompt must be a string"),
        ('{"prompt": ""}', "prompt must be a string that is not empty"),
        ('{"messages": []}', "messages must be a list that is not empty"),
        ('{"messages": [{"content": "no role"}]}', "must be an object with a role"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be from 1"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens must be a whole number"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature must be a number"),
        ('{"prompt": "a", "top_p": 1.5}', "top_p must be from 0 to 1"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "'x' is not a token id"),
        ('{"prompt": "a", "n": 2}', "n must be 1"),
        ('{"prompt": "a", "temprature": 1, "stream": true}', "'stream', 'temprature': not an option"),
        ('{"prompt": "a", "stop": ""}', "none of them empty"),
        ('{"prompt": "a", "tools": []}', "'tools': not an option"),
    ],
)
def test_an_unusable_line_is_an_error_of_that_line_alone(line: str, message: str) -> None:
    before, broken, after = read(['{"prompt": "a"}', line, '{"prompt": "b"}'])
    assert (before, after) == (Prompt(0, "a"), Prompt(2, "b"))
    assert broken.error is not None and broken.error.startswith("line 2: ") and message in broken.error


def test_a_file_is_json_lines_even_if_its_first_line_is_broken() -> None:
    for name, lines in (("f", ['{"prompt": "cut', '{"prompt": "b"}']), ("f.jsonl", ["x", '{"prompt": "b"}'])):
        broken, good = read(lines, name)
        assert broken.error is not None and good.text == "b"


def test_text_that_is_not_utf8_is_an_error_of_its_line() -> None:
    first, second = read_prompts([b"caf\xe9\n", b"tea\n"], "f")
    assert first.error == "line 1: it is not UTF-8 text" and second.text == "tea"


# Writing -----------------------------------------------------------------------------------------------------------

PROMPTS = [Prompt(i, f"p{i}") for i in range(5)]


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


def test_results_come_in_order_whatever_finishes_first() -> None:
    out = io.StringIO()
    results = Results(PROMPTS, None, out)
    seen = []
    for index in (1, 0, 4, 3, 2):
        results.add(PROMPTS[index], text=str(index))
        seen.append(out.getvalue().count("\n"))
    assert seen == [0, 2, 2, 2, 5]
    assert [json.loads(line)["text"] for line in out.getvalue().splitlines()] == list("01234")
    assert results.counts == Counts(5, 5, 0)


def test_an_interrupted_run_goes_on_with_all_it_had(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(PROMPTS, path, io.StringIO())
    for index in (0, 3, 1):
        results.add(PROMPTS[index], text=str(index))
    # No close(): the process was killed, in the middle of a line.
    with path.open("a") as out:
        out.write('{"index": 2, "te')
    with pytest.raises(PromptsFileError, match="--resume"):
        Results(PROMPTS, path, io.StringIO())
    again = Results(PROMPTS, path, io.StringIO(), resume=True)
    assert [p.index for p in again.missing()] == [2, 4]
    assert again.counts == Counts(3, 5, 0)
    for index in (4, 2):
        again.add(PROMPTS[index], text=str(index))
    again.close()
    assert indices(path) == [0, 1, 2, 3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl"]


def test_failed_prompts_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(PROMPTS[:3], path, io.StringIO())
    results.add(PROMPTS[0], error="no room")
    results.add(PROMPTS[1], text="1")
    results.add(PROMPTS[2], text="2")
    assert results.counts == Counts(3, 3, 1)
    results.close()
    again = Results(PROMPTS[:3], path, io.StringIO(), resume=True)
    assert [p.index for p in again.missing()] == [0]
    again.add(PROMPTS[0], text="0")
    again.close()
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["0", "1", "2"]


def test_a_mended_line_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    broken = [Prompt(0, "a"), Prompt(1, None, error="line 2: no")]
    results = Results(broken, path, io.StringIO())
    results.add(broken[0], text="0")
    results.add(broken[1], error=broken[1].error)
    results.close()
    again = Results([Prompt(0, "a"), Prompt(1, "b")], path, io.StringIO(), resume=True)
    assert [p.text for p in again.missing()] == ["b"]


def test_sampling_options_are_part_of_what_a_result_belongs_to(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results([Prompt(0, "a", sampling={"temperature": 1})], path, io.StringIO())
    results.add(results.prompts[0], text="0")
    results.close()
    with pytest.raises(PromptsFileError, match="another prompt"):
        Results([Prompt(0, "a", sampling={"temperature": 2})], path, io.StringIO(), resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_an_output_that_cannot_be_written_is_a_clear_error(tmp_path: Path, resume: bool) -> None:
    with pytest.raises(PromptsFileError, match="nowhere"):
        Results(PROMPTS, tmp_path / "nowhere" / "out.jsonl", io.StringIO(), resume=resume)
    with pytest.raises(PromptsFileError, match="there already" if not resume else "cannot be kept"):
        Results(PROMPTS, tmp_path, io.StringIO(), resume=resume)


def test_a_result_that_cannot_be_written_is_a_clear_error() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(PromptsFileError, match="No space left"):
        Results(PROMPTS, None, Full()).add(PROMPTS[0], text="0")


def test_a_full_disk_keeps_whole_lines_and_the_run_goes_on_from_them(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(PROMPTS, path, io.StringIO())
    results.add(PROMPTS[0], text="0")
    results.add(PROMPTS[3], text="3")
    with file_size_limit(path.stat().st_size + 20), pytest.raises(PromptsFileError, match="cannot be kept"):
        results.add(PROMPTS[1], text="1" * 5000)
    assert indices(path) == [0] and path.read_bytes().endswith(b"\n")
    with file_size_limit(path.stat().st_size + 20):
        results.close()  # has nothing left to write
    with file_size_limit(20), pytest.raises(PromptsFileError, match="cannot be kept"):
        Results(PROMPTS, path, io.StringIO(), resume=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.partial"]
    again = Results(PROMPTS, path, io.StringIO(), resume=True)
    assert indices(path) == [0] and [prompt.index for prompt in again.missing()] == [1, 2, 4]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file grows beyond this size within: writing fails, or writes a part only, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_results_of_other_prompts_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(PROMPTS, path, io.StringIO())
    results.add(PROMPTS[0], text="0")
    results.close()
    with pytest.raises(PromptsFileError, match="another prompt at index 0"):
        Results([Prompt(0, "other")], path, io.StringIO(), resume=True)
    path.write_text('{"index": 9}\n')
    with pytest.raises(PromptsFileError, match="index 9, of 5"):
        Results(PROMPTS, path, io.StringIO(), resume=True)
