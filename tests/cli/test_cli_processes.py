"""`subbayes fit` on several processes: the same model, said once."""

import numpy as np
import pandas as pd
import pytest
from distributed.launch import outputs, start


@pytest.mark.slow
def test_processes_fit_the_same_model(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3))
    frame = pd.DataFrame(x, columns=list("abc")).assign(y=np.sin(x[:, 0]))
    frame.to_csv(tmp_path / "table.csv", index=False)
    files = {}
    for count in (1, 2):
        out = tmp_path / str(count)
        words = ["-m", "subbayes", "fit", str(tmp_path / "table.csv"), "--target", "y"]
        words += ["--out", str(out), "--epochs", "5", "--draws", "10"]
        found = outputs(start(count, words), 300)
        assert {code for code, _, _ in found} == {0}, found[0][2]
        assert "mixing" in found[0][1]
        for _, text, errors in found[1:]:
            assert (text, errors) == ("", "")
        files[count] = [file.read_bytes() for file in out.glob("model/*.safetensors")]
    assert files[1] == files[2]


@pytest.mark.slow
def test_an_error_is_one_line_of_each_process(tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n1,2\n2,3\n")
    words = ["-m", "subbayes", "fit", str(tmp_path / "table.csv"), "--target", "q"]
    for code, text, errors in outputs(start(2, [*words, "--out", str(tmp_path / "out")]), 300):
        assert (code, text) == (2, "")
        assert errors.startswith("subbayes: error: --target: expected one of the columns")
        assert errors.count("\n") == 1
