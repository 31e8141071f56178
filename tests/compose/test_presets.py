"""Names that others gave to methods with certain values."""

import pytest

from atoll.compose import create, read
from atoll.compose.names import PRESETS
from atoll.kernel.errors import UnknownName


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_method_that_it_stands_for(name: str) -> None:
    assert create(name) == create(name.lower()) == create(PRESETS[name])
    assert read(name).name == PRESETS[name].partition(":")[0]
    assert create(f"{name}:epochs=36,temperature=0.07") == create(
        f"{PRESETS[name].replace('temperature=0.5', 'temperature=0.07')},epochs=36"
    )


def test_names_that_are_near_a_preset() -> None:
    with pytest.raises(UnknownName, match="Unknown algorithm 'OursV7'.") as caught:
        create("OursV7")
    assert "OursV4, OursV5, OursV6" in str(caught.value)


def test_a_word_of_others_is_explained() -> None:
    with pytest.raises(UnknownName, match="Unknown hyperparameter of fafi-two-stage 'alignment_epochs'") as caught:
        create("OursV6:alignment_epochs=7")
    assert "hint: `stage_share` says how long the first stage is, as a share of all epochs: 7 of 36" in str(
        caught.value
    )
    assert create("OursV6:epochs=36,stage_share=0.19").training.pieces[-1].first_stage(36) == 7
