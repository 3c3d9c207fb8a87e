"""Documents and prompts of the task race_middle, as lm-evaluation-harness makes those of `race`.

A document of that task is an article with all its questions. The last question is asked after the
article and the other questions with their answers.
"""

from typing import Any

import datasets
from lm_eval.tasks.race.preprocess_race import doc_to_choice, doc_to_target, doc_to_text

__all__ = ["doc_to_choice", "doc_to_target", "doc_to_text", "group_questions"]


def group_questions(rows: "datasets.Dataset") -> "datasets.Dataset":
    """Return one document for each article of `rows`, which have one question each."""
    questions: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        parts = {name: row[name] for name in ("question", "options", "answer")}
        questions.setdefault(row["article"], []).append(parts)
    documents = []
    for article, problems in questions.items():
        documents.append({"article": article, "problems": repr(problems)})
    return datasets.Dataset.from_list(documents)
