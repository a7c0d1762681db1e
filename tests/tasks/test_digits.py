"""The first look that works anywhere: data of scikit-learn, and a model that is made here."""

from pathlib import Path

import pytest
from transformers import AutoModelForImageClassification

from hf_coefsfl.cli import main
from hf_coefsfl.compare import expand, load_spec
from hf_coefsfl.tasks import TASKS, digits
from hf_coefsfl.tasks.loading import load_splits


def test_the_parts_have_no_image_in_common() -> None:
    splits = load_splits("digits")
    images = {name: [image.tobytes() for image in rows["image"]] for name, rows in splits.items()}
    assert {name: len(rows) for name, rows in images.items()} == {"public": 252, "train": 897, "test": 400}
    assert set(splits["public"]["label"]) == set(range(5)) and set(splits["train"]["label"]) == set(range(10))
    again = [image.tobytes() for image in load_splits("digits")["test"]["image"]]
    assert again == images["test"]


def test_the_model_is_made_once_and_knows_its_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(digits, "_PRETRAINING_STEPS", 40)
    folder = digits.digits_model()
    made = (Path(folder) / "model.safetensors").stat().st_mtime_ns
    assert digits.digits_model() == folder and (Path(folder) / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in Path(folder).parent.iterdir()] == [digits.MODEL]  # nothing half-made stays
    task = TASKS["digits"](TASKS["digits"].arguments_class(model_name_or_path=folder))
    prepared = task.prepare(seed=0)
    assert prepared.model.config.id2label == {i: str(i) for i in range(10)}
    pretrained = AutoModelForImageClassification.from_pretrained(folder)
    public = digits.load_digits()["public"].select(range(100)).rename_column("label", "labels")
    batch = prepared.data_collator([public[i] for i in range(100)])
    right = (pretrained(batch["pixel_values"]).logits.argmax(-1) == batch["labels"]).float().mean()
    assert right > 0.4  # of five digits; more steps know more


def test_a_spec_that_needs_missing_files_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["compare", "tiny", "--output_dir", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert "../shared/data/sick_nli (dataset_name of SICK)" in error and "coefsfl compare digits" in error
    assert not (tmp_path / "out").exists()


def test_the_first_look_needs_no_files_and_shows_our_method_beside_the_papers() -> None:
    cells = expand(load_spec("digits"))
    assert [cell.variant.name for cell in cells][-1] == "CoeF-J, walk" and not any(cell.refused for cell in cells)
    assert not any("_name" in option for cell in cells for option in cell.spec.options)
