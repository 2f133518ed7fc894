"""GSM8K: is the last number of the answer the number that the reference gives after "####"?"""

import re
from decimal import Decimal

import datasets
import evaluate

_DESCRIPTION = "Share of answers whose last number is the one that the GSM8K reference gives after '####'."
_CITATION = """
@article{cobbe2021gsm8k,
  title={Training Verifiers to Solve Math Word Problems},
  author={Cobbe, Karl and others},
  journal={arXiv preprint arXiv:2110.14168},
  year={2021}
}
"""
_INPUTS = """
Args:
    predictions (`list[str]`): Answers of the model.
    references (`list[str]`): The `answer` column of openai/gsm8k; its solution is the number after "####".
Returns:
    exact_match (`float`): Share of answers that give the same number, between 0 and 1.
"""
# A minus counts where no word or bracket stands before it: "8-3" is no -3. A comma only before three digits.
NUMBER = re.compile(r"(?:(?<![\w)])-\$?)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


def last_number(text: str) -> Decimal | None:
    """Returns the last number of a text, or `None` if there is none. 18, 18.0 and $18.00 are the same number."""
    numbers = NUMBER.findall(text)
    return Decimal(re.sub(r"[$,]", "", numbers[-1])) if numbers else None


class GSM8KExactMatch(evaluate.Metric):
    """See `_INPUTS`."""

    def _info(self):
        features = {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(features),
            reference_urls=["https://github.com/openai/grade-school-math"],
        )

    def _compute(self, predictions, references):
        same = 0
        for prediction, reference in zip(predictions, references):
            solution = last_number(reference.rpartition("####")[2])
            if solution is None:
                raise ValueError(f'A reference has no number after "####": {reference[-80:]!r}.')
            same += last_number(prediction) == solution
        return {"exact_match": same / len(predictions)}
