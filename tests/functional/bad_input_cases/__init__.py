"""All bad inputs, in the order of docs/errors.json."""

from __future__ import annotations

from bad_input_case import Case

from bad_input_cases import configuration, data, models, nemo_rl, run_directories

CASES: list[Case] = [
    case
    for module in (configuration, models, data, run_directories, nemo_rl)
    for category in module.CATEGORIES
    for case in category.cases
]
