"""Floors of translation: n-grams in sets, model 1 in dictionaries, and BLEU of sacrebleu."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch

from lit_attn.data.text.parallel import ParallelText, measure_bleu
from lit_attn.floors.sentences import (
    ROUNDS,
    TRANSLATION_RULES,
    SentencePairs,
    estimate_dictionary,
    find_nearest,
    translate_words,
)

LEXICON = {
    "der": "the",
    "hund": "dog",
    "katze": "cat",
    "läuft": "runs",
    "schläft": "sleeps",
    "heute": "today",
    "laut": "loudly",
    "und": "and",
}


def make_pairs(count: int, seed: int) -> SentencePairs:
    """Return sentences of random words with their translations in another order."""
    generator = np.random.default_rng(seed)
    sources, targets = [], []
    for _ in range(count):
        words = generator.choice(list(LEXICON), generator.integers(2, 7)).tolist()
        translated = [LEXICON[word] for word in words]
        generator.shuffle(translated)
        sources.append(" ".join(words))
        targets.append(" ".join(translated))
    return SentencePairs(sources, targets)


def list_ngrams(sentence: str) -> set[tuple[str, ...]]:
    """Return the different n-grams of one to three words."""
    words = sentence.split()
    spans = [(start, start + n) for n in (1, 2, 3) for start in range(len(words) - n + 1)]
    return {tuple(words[start:end]) for start, end in spans}


def test_the_nearest_sentence_shares_most_ngrams() -> None:
    known, sentences = make_pairs(60, 0).sources, [*make_pairs(20, 1).sources, "xyz", "Hund"]
    expected = []
    for sentence in sentences:
        wanted = list_ngrams(sentence)
        overlaps = []
        for other in known:
            ngrams = list_ngrams(other)
            overlaps.append(2 * len(ngrams & wanted) / (len(ngrams) + len(wanted)))
        expected.append(int(np.argmax(overlaps)))
    assert find_nearest(known, sentences) == expected
    assert find_nearest(["", " "], ["hund"]) == [0]


def test_translations_of_words_equal_those_of_dictionaries() -> None:
    train = make_pairs(40, 2)
    table: dict[tuple[str, str], float] = defaultdict(lambda: 1.0)
    for _ in range(ROUNDS):
        expected: dict[tuple[str, str], float] = defaultdict(float)
        for source, target in zip(*train, strict=True):
            for word in target.split():
                total = sum(table[word, other] for other in source.split())
                for other in source.split():
                    expected[word, other] += table[word, other] / total
        totals: dict[str, float] = defaultdict(float)
        for (_, other), count in expected.items():
            totals[other] += count
        for word, other in expected:
            table[word, other] = expected[word, other] / totals[other]
    best = {}
    for other in LEXICON:
        best[other] = max(LEXICON.values(), key=lambda word: table[word, other])
    assert estimate_dictionary(train) == best == LEXICON
    assert translate_words(train, ["hund Hund läuft", ""]) == ["dog Hund runs", ""]
    assert translate_words(SentencePairs([""], [""]), ["hund"]) == ["hund"]


def test_bleu_is_that_of_sacrebleu() -> None:
    texts, references = make_pairs(30, 3).targets, make_pairs(30, 4).targets
    expected = sacrebleu.corpus_bleu(
        texts, [references], tokenize="none", smooth_method="none"
    ).score
    assert measure_bleu(texts, references) == pytest.approx(expected / 100)
    assert measure_bleu(references, references) == pytest.approx(1)
    # An unknown character of a translation is no unknown character of the reference.
    assert measure_bleu(["a b c <unk>"], ["a b c <unk>"]) < 1


def test_sentence_pairs_have_three_floors(tmp_path: Path) -> None:
    for name, count in (("train", 200), ("valid", 10), ("test", 20)):
        pairs = make_pairs(count, len(name))
        for language, sentences in zip(("de", "en"), pairs, strict=True):
            (tmp_path / f"{name}.{language}").write_text("\n".join(sentences) + "\n", "utf-8")
    data = ParallelText(name="own", folder=tmp_path, vocabulary=80, batch_size=64, context=60)
    module = data.build(0, torch.device("cpu"))
    floors = {floor.rule: floor for floor in module.floors("test", 1)}
    assert tuple(floors) == TRANSLATION_RULES == data.floor_rules
    train, test = make_pairs(200, 5), make_pairs(20, 4)
    translated = [" ".join(LEXICON[word] for word in line.split()) for line in test.sources]
    nearest = [train.targets[place] for place in find_nearest(train.sources, test.sources)]
    for rule, texts in zip(TRANSLATION_RULES, (test.sources, nearest, translated), strict=True):
        expected = sacrebleu.corpus_bleu(
            texts, [test.targets], tokenize="none", smooth_method="none"
        ).score
        assert floors[rule].values["bleu"] == pytest.approx(expected / 100)
        assert floors[rule].conditions == "200 training pairs, 20 evaluated"
