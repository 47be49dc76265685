"""The notebook runs from the first cell to the last, and what it says is so."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Jupyter: the code cells in order, in one namespace."""
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    pictures = [output for cell in cells for output in cell["outputs"] if "image/png" in output.get("data", {})]
    assert len(pictures) == 1, "it shows what it gives: jupyter nbconvert --execute --inplace"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    backend = matplotlib.get_backend()
    matplotlib.use("Agg")
    try:
        for number, cell in enumerate(cells):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    finally:
        plt.close("all")
        matplotlib.use(backend)
    assert namespace["data"].natural_clients == 12
    assert namespace["run"].result()["status"] == "interrupted"
    assert namespace["result"]["status"] == "done"
    assert all(namespace["same"])
    assert len(namespace["result"]["accuracy_by_level"]) == 4
    assert namespace["result"]["accuracy"] > 0.8
    assert (tmp_path / "spiral.png").stat().st_size > 10_000
