"""From text to token rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.schema import CalibrationConfig
from pipeline.errors import BadTokenizer, ConfigError, Unreadable
from pipeline.quantize.calibration import TextSet, _shares, digest_rows, draw_rows, sample, text_sets, warnings
from pipeline.quantize.documents import SHIPPED_CALIBRATION, SHIPPED_HELD, Document, common_documents, read_documents
from pipeline.quantize.text_encoder import TextEncoder
from tests.support.checkpoints import tiny_tokenizer

pytestmark = pytest.mark.fast

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a byte-level tokenizer whose end of sequence is id 2."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(directory)
    return directory


def _with_config(tokenizer: Path, directory: Path, **changes: object) -> Path:
    tiny_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def _texts(count: int, words: int = 12) -> list[Document]:
    return [Document(text=f"{n} " + "the capital of France is Paris " * words) for n in range(count)]


def test_every_malformed_row_is_listed_with_file_and_line(tmp_path: Path) -> None:
    """All bad rows come in one error, each with its own line and reason."""
    path = tmp_path / "text.jsonl"
    path.write_text(
        '{"text": "good"}\n{"text": 3}\n\nnot json\n[1]\n{"title": "x"}\n{"text": "a", "prompt": "b"}\n'
        '{"messages": []}\n{"messages": [{"role": "user"}]}\n'
    )
    with pytest.raises(ConfigError) as raised:
        read_documents(path)
    found = [problem.where.rpartition(":")[2] for problem in raised.value.problems]
    assert found == ["2", "4", "5", "6", "7", "8", "9"]


def test_a_long_list_of_malformed_rows_is_cut_and_counted(tmp_path: Path) -> None:
    """Twenty rows are shown and the rest is a number."""
    path = tmp_path / "text.jsonl"
    path.write_text("x\n" * 25)
    with pytest.raises(ConfigError, match="25 malformed rows") as raised:
        read_documents(path)
    assert len(raised.value.problems) == 21
    assert "and 5 more" in raised.value.problems[-1].message


def test_jsonl_gives_text_prompt_and_messages(tmp_path: Path) -> None:
    """Each of the three columns becomes a document."""
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a"}\n{"prompt": "b"}\n{"messages": [{"role": "user", "content": "c", "id": 1}]}\n')
    assert read_documents(path) == [
        Document(text="a"),
        Document(text="b"),
        Document(messages=({"role": "user", "content": "c"},)),
    ]


def test_a_line_separator_inside_a_string_does_not_end_the_row(tmp_path: Path) -> None:
    """JSON allows U+2028 unescaped inside a string."""
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a\u2028b"}\n', encoding="utf-8")
    assert read_documents(path) == [Document(text="a\u2028b")]


def test_plain_text_is_one_document_a_paragraph(tmp_path: Path) -> None:
    """Blank lines separate documents, with either line ending."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"one\ntwo\r\n\r\nthree\n\n\n\nfour\n")
    assert [document.text for document in read_documents(path)] == ["one\ntwo", "three", "four"]


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    """The path is the user's, so the config is wrong."""
    with pytest.raises(ConfigError, match="does not exist"):
        read_documents(tmp_path / "none.jsonl")


def test_a_file_that_is_not_utf8_names_the_byte(tmp_path: Path) -> None:
    """A Latin-1 file is refused instead of guessed at."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(Unreadable, match="byte 3"):
        read_documents(path)


def test_an_empty_file_is_a_config_error(tmp_path: Path) -> None:
    """Nothing to observe is never accepted silently."""
    path = tmp_path / "text.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no text"):
        read_documents(path)


def test_rows_have_one_length_and_the_number_asked_for(tokenizer: Path) -> None:
    """Rows need no padding."""
    drawn = draw_rows(_texts(20), TextEncoder(tokenizer), num_samples=6, max_seq_len=32, seed=0)
    assert [len(row) for row in drawn.rows] == [32] * 6
    assert drawn.record["tokens"] == 192


def test_the_seed_alone_decides_the_rows(tokenizer: Path) -> None:
    """Equal seeds give equal rows and digests; another seed gives others."""
    encoder = TextEncoder(tokenizer)
    first, again, other = (
        draw_rows(_texts(20), encoder, num_samples=4, max_seq_len=32, seed=seed) for seed in (7, 7, 8)
    )
    assert first == again
    assert digest_rows(first.rows) != digest_rows(other.rows)


def test_the_digest_sees_where_rows_begin() -> None:
    """The same ids cut differently are another calibration."""
    assert digest_rows([[1, 2], [3]]) != digest_rows([[1], [2, 3]])
    assert digest_rows([[1, 2]]) == digest_rows([(1, 2)])


def test_every_document_gives_its_first_piece_before_any_gives_its_second(tokenizer: Path) -> None:
    """Long documents do not crowd out the others."""
    encoder = TextEncoder(tokenizer)
    documents = _texts(5, words=30)
    drawn = draw_rows(documents, encoder, num_samples=5, max_seq_len=24, seed=0)
    expected = {(*encoder.encode(document)[:23], EOS) for document in documents}
    assert set(drawn.rows) == expected


def test_long_documents_are_used_to_their_end(tokenizer: Path) -> None:
    """What a first piece leaves over fills later rows."""
    encoder = TextEncoder(tokenizer)
    document = Document(text="the capital of France is Paris " * 30)
    ids = encoder.encode(document)
    drawn = draw_rows([document], encoder, num_samples=3, max_seq_len=16, seed=0)
    assert [row[:15] for row in drawn.rows] == [tuple(ids[start : start + 15]) for start in (0, 15, 30)]


def test_duplicates_and_near_empty_documents_are_dropped_and_counted(tokenizer: Path) -> None:
    """Neither teaches an observer anything."""
    documents = [*_texts(4), *_texts(2), Document(text="a"), Document(text="")]
    record = draw_rows(documents, TextEncoder(tokenizer), num_samples=100, max_seq_len=16, seed=0).record
    assert (record["documents"], record["duplicates_dropped"], record["near_empty_dropped"]) == (8, 2, 2)
    assert record["documents_used"] == 4


def test_only_near_empty_documents_is_a_config_error(tokenizer: Path) -> None:
    """Calibration never runs on nothing."""
    with pytest.raises(ConfigError, match="shorter than 8 tokens"):
        draw_rows([Document(text="a")], TextEncoder(tokenizer), num_samples=1, max_seq_len=16, seed=0)


def test_too_little_user_text_says_how_many_sequences_it_gives(tokenizer: Path, tmp_path: Path) -> None:
    """The hint holds the number that works."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(document.text for document in _texts(4)))
    with pytest.raises(ConfigError, match="num_samples asks for 500") as raised:
        sample([TextSet(path=path, name=path.name)], tokenizer, num_samples=500, max_seq_len=16)
    works = int(raised.value.hint.rstrip(".").rpartition(" ")[2])
    assert len(sample([TextSet(path=path, name=path.name)], tokenizer, num_samples=works, max_seq_len=16).rows) == works
    with pytest.raises(ConfigError):
        sample([TextSet(path=path, name=path.name)], tokenizer, num_samples=works + 1, max_seq_len=16)


def test_less_than_one_row_of_user_text_says_how_many_tokens_it_has(tokenizer: Path, tmp_path: Path) -> None:
    """A shorter max_seq_len is the way out."""
    path = tmp_path / "text.txt"
    path.write_text("the capital of France is Paris, said the fox")
    with pytest.raises(ConfigError, match="gives 0 sequences") as raised:
        sample([TextSet(path=path, name=path.name)], tokenizer, num_samples=1, max_seq_len=4096)
    assert "lower calibration.max_seq_len" in raised.value.hint


def test_the_shipped_sample_gives_what_it_has(tokenizer: Path) -> None:
    """The default never fails for want of text, and the record says how much was fed."""
    drawn = sample(text_sets(CalibrationConfig()), tokenizer, num_samples=10**6, max_seq_len=512)
    assert 64 <= len(drawn.rows) < 10**6
    assert drawn.record["requested_sequences"] == 10**6
    assert drawn.origin == "shipped"


def test_shipped_calibration_and_held_text_share_no_twelve_words() -> None:
    """Perplexity is measured on text that no observer saw."""

    def windows(path: Path) -> set[tuple[str, ...]]:
        found: set[tuple[str, ...]] = set()
        for document in read_documents(path):
            text = document.text or " ".join(message["content"] for message in document.messages)
            words = text.split()
            found |= {tuple(words[n : n + 12]) for n in range(len(words) - 11)}
        return found

    calibration, held = windows(SHIPPED_CALIBRATION), windows(SHIPPED_HELD)
    assert len(held) > 1000
    assert not calibration & held


def test_messages_go_through_the_chat_template_without_extra_special_tokens(tokenizer: Path) -> None:
    """The template writes every special token itself."""
    encoder = TextEncoder(tokenizer)
    messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"})
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert encoder.render(messages) == rendered
    ids = encoder.encode(Document(messages=messages))
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 2)


def test_a_template_file_wins_over_the_tokenizer_config(tokenizer: Path, tmp_path: Path) -> None:
    """Newer checkpoints keep the template in chat_template.jinja."""
    tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert TextEncoder(tmp_path).render([{"role": "user", "content": "Hi"}]) == "[Hi]"


def test_messages_without_a_chat_template_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    """A made-up template would calibrate on text that is never served."""
    encoder = TextEncoder(_with_config(tokenizer, tmp_path, chat_template=None))
    with pytest.raises(ConfigError, match="no chat template"):
        encoder.encode(Document(messages=({"role": "user", "content": "Hi"},)))


def test_a_template_that_refuses_a_conversation_is_reported(tokenizer: Path, tmp_path: Path) -> None:
    """raise_exception in a template becomes our error."""
    directory = _with_config(tokenizer, tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadTokenizer, match="roles must alternate"):
        TextEncoder(directory).render([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(("flag", "first"), [(True, True), (False, False), (None, False)])
def test_a_bos_token_is_added_when_the_tokenizer_config_says_so(
    tokenizer: Path, tmp_path: Path, flag: bool | None, first: bool
) -> None:
    """The tiny tokenizer.json adds none by itself."""
    directory = _with_config(tokenizer, tmp_path, add_bos_token=flag)
    assert (TextEncoder(directory).encode(Document(text="the capital"))[0] == 1) is first


def test_an_eos_token_is_added_when_the_tokenizer_config_says_so(tokenizer: Path, tmp_path: Path) -> None:
    """And it is not doubled by the separator between documents."""
    encoder = TextEncoder(_with_config(tokenizer, tmp_path, add_eos_token=True))
    assert encoder.encode(Document(text="the capital"))[-1] == EOS
    text = Document(text="the capital of France is Paris and Rome")
    ids = encoder.encode(text)
    row = draw_rows([text], encoder, num_samples=1, max_seq_len=len(ids) + 5, seed=0).rows[0]
    assert row == tuple(ids)


def test_a_broken_tokenizer_file_is_reported(tmp_path: Path) -> None:
    """The file is named."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadTokenizer, match=r"tokenizer\.json"):
        TextEncoder(tmp_path)


def _written(directory: Path, **files: list[Document]) -> list[TextSet]:
    sets = []
    for name, documents in files.items():
        path = directory / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"text": document.text}) for document in documents))
        sets.append(TextSet(path=path, name=path.name))
    return sets


def _other_texts(count: int) -> list[Document]:
    return [Document(text=f"{n} " + "Rome said the quick brown fox in Italy " * 12) for n in range(count)]


def test_sets_share_the_rows_by_weight_and_alternate(tokenizer: Path, tmp_path: Path) -> None:
    """Three to one is three rows of the first for each of the second, in every part of the calibration."""
    first, second = _written(tmp_path, first=_texts(40), second=_other_texts(40))
    weighted = [replace(first, weight=3.0), replace(second, weight=1.0)]
    drawn = sample(weighted, tokenizer, num_samples=8, max_seq_len=32)
    alone = {one.name: set(sample([one], tokenizer, num_samples=8, max_seq_len=32).rows) for one in (first, second)}
    assert [row in alone["second.jsonl"] for row in drawn.rows[:4]].count(True) == 1
    assert [row in alone["second.jsonl"] for row in drawn.rows[4:]].count(True) == 1
    assert [(one["name"], one["weight"], one["sequences"]) for one in drawn.record["sets"]] == [
        ("first.jsonl", 3.0, 6),
        ("second.jsonl", 1.0, 2),
    ]
    assert drawn == sample(weighted, tokenizer, num_samples=8, max_seq_len=32)


@pytest.mark.parametrize(("weights", "rows"), [((1, 1, 1), (4, 3, 3)), ((5, 1), (8, 2)), ((1000, 1), (10, 0))])
def test_rows_left_over_go_to_the_largest_remainder(weights: tuple[float, ...], rows: tuple[int, ...]) -> None:
    """Shares are whole rows and add up."""
    assert tuple(_shares(weights, 10)) == rows


def test_a_set_that_is_too_small_for_its_share_is_refused_with_numbers(tokenizer: Path, tmp_path: Path) -> None:
    """The number in the hint works."""
    sets = _written(tmp_path, large=_texts(200), small=_other_texts(2))
    with pytest.raises(ConfigError) as raised:
        sample(sets, tokenizer, num_samples=100, max_seq_len=16)
    (problem,) = raised.value.problems
    assert "small.jsonl gives" in problem.message
    assert "its share is 50" in problem.message
    works = int(raised.value.hint.rstrip(".").rpartition(" ")[2])
    assert len(sample(sets, tokenizer, num_samples=works, max_seq_len=16).rows) == works


def test_a_document_of_two_sets_counts_for_the_first(tokenizer: Path, tmp_path: Path) -> None:
    """It is dropped from the second and said so."""
    sets = _written(tmp_path, first=_texts(30), second=[*_texts(5), *_other_texts(30)])
    record = sample(sets, tokenizer, num_samples=4, max_seq_len=32).record
    assert [one["duplicates_of_other_sets_dropped"] for one in record["sets"]] == [0, 5]


def test_lengths_are_told_by_their_quantiles(tokenizer: Path) -> None:
    """Median, the length that nine of ten do not exceed, and how many are longer than a row."""
    documents = [Document(text="a b c d e f g h " * n) for n in range(1, 11)]
    record = draw_rows(documents, TextEncoder(tokenizer), num_samples=100, max_seq_len=64, seed=0).record
    lengths = sorted(len(TextEncoder(tokenizer).encode(document)) for document in documents)
    assert record["document_tokens"]["p50"] == lengths[5]
    assert record["document_tokens"]["p90"] == lengths[9]
    assert record["longer_than_a_row"] == sum(length > 64 for length in lengths)


def test_text_that_calibrates_badly_is_told(tokenizer: Path, tmp_path: Path) -> None:
    """Repeats, near-empty documents, short ones, and too few different tokens, each in its own words."""
    documents = [*_texts(40, words=40), *_texts(20, words=40), *[Document(text=f"{n}") for n in range(40)]]
    (one,) = _written(tmp_path, one=documents)
    found = " ".join(warnings(sample([one], tokenizer, num_samples=8, max_seq_len=512).record))
    for words in ("documents repeat another one", "fewer than 8 tokens", "distinct tokens in"):
        assert words in found
    (short,) = _written(tmp_path, short=_other_texts(60))
    found = " ".join(warnings(sample([short], tokenizer, num_samples=2, max_seq_len=2048).record))
    assert "packed from many short ones" in found


def test_the_shipped_text_gives_no_warning(tokenizer: Path) -> None:
    """The default is beyond reproach."""
    drawn = sample(text_sets(CalibrationConfig()), tokenizer, num_samples=64, max_seq_len=512)
    assert warnings(drawn.record) == []


def test_a_parquet_file_is_refused_with_what_to_write(tmp_path: Path) -> None:
    """It is not called broken text."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="is a Parquet file"):
        read_documents(tmp_path / "a.parquet")


def test_documents_are_common_whatever_their_case_and_spaces() -> None:
    """A copy that was reformatted leaks as much as any."""
    first = [Document(text="The  capital\nof France"), Document(messages=({"role": "user", "content": "Hi"},))]
    second = [Document(text="the capital of france "), Document(text="hi"), Document(text="something else")]
    assert common_documents(first, second) == 2


@pytest.mark.parametrize(
    ("config", "sequences"),
    [({}, 4), ({"max_seq_len": 128}, 16), ({"max_seq_len": 8192}, 1), ({"batch_size": 3, "max_seq_len": 8}, 3)],
)
def test_a_pass_has_as_many_sequences_as_the_config_alone_says(config: dict[str, int], sequences: int) -> None:
    """About 2048 tokens where nothing is written, on every machine, so that every machine finds the same ranges."""
    assert CalibrationConfig(**config).sequences_per_pass == sequences
