"""Steps and accumulators are not copied: the error says what to do instead."""

from __future__ import annotations

import copy
import pickle

import keras
import pytest
from each import each

import tfmultigpu as tmg


@each("do", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_in_words(do: object) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made = [
        tmg.make_train_step(model, keras.optimizers.SGD(), "mse"),
        tmg.make_eval_step(model, "mse"),
        tmg.make_predict_step(model),
        tmg.GradientAccumulator(model.trainable_variables),
    ]
    for one in made:
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*model\.save") as caught:
            do(one)  # type: ignore[operator]
        assert type(one).__name__ in str(caught.value)
