"""What is released: one version, and a wheel that trains without the clone."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomllib
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification

import hf_coefsfl
from tests.support.paths import ROOT
from tests.support.words import WORDS, words_tokenizer


def test_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert hf_coefsfl.__version__ == version
    assert not [path for path in ROOT.glob("hf_coefsfl/**/*.py") if version in path.read_text()]
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (?:\d{4}-\d\d-\d\d|unreleased)$", changelog, flags=re.MULTILINE)
    assert sections[0] == version and sections == sorted(sections, reverse=True)


def run(*words: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_wheel_alone_trains(tmp_path: Path) -> None:
    """Built from the sdist, which is built from the clone; installed where nothing else leads to the clone."""
    clone, dist, venv = tmp_path / "clone", tmp_path / "dist", tmp_path / "venv"
    products = shutil.ignore_patterns(
        ".git", "__pycache__", "outputs", "site", "dist", "build", "*.egg-info", ".*_cache"
    )
    shutil.copytree(ROOT, clone, ignore=products)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, clone, cwd=tmp_path)
    shutil.rmtree(clone)
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"docs/README.md", "recipes/quickstart.py", "Makefile", ".ci/venv.py", "CHANGELOG.md"} <= names

    with zipfile.ZipFile(wheel) as files:
        (metadata,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        description = files.read(metadata).decode().partition("\n\n")[2]
    assert description.startswith("# hf_coefsfl\n") and "[docs/using.md]" not in description
    targets = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", description)
    assert not [target for target in map("".join, targets) if not target.startswith(("https://", "#"))]

    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python, here = venv / "bin" / "python", sysconfig.get_paths()["purelib"]
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path).strip())
    (site / "others.pth").write_text(f"{here}\n")  # torch and the like, which need not be installed a second time

    texts = [" ".join(WORDS[6 + (i + k) % 5] for k in range(4)) for i in range(24)]
    Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(24)]}).to_csv(str(tmp_path / "posts.csv"))
    small = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), **small)).save_pretrained(tmp_path / "model")
    words_tokenizer().save_pretrained(tmp_path / "model")
    command = [venv / "bin" / "coefsfl", "train", "newsgroups", "--dataset_name", "posts.csv", "--model_name_or_path"]
    command += ["model", "--eval_split", "train", "--num_clients", "4", "--num_rounds", "2", "--warmup_rounds", "1"]
    command += ["--per_device_train_batch_size", "4", "--max_length", "8", "--output_dir", "run"]
    printed = run(*command, cwd=tmp_path)
    assert "2 rounds: accuracy" in printed
    for name in ("adapter_model.safetensors", "client/adapter_model.safetensors", "README.md", "summary.json"):
        assert (tmp_path / "run" / name).is_file()
    place = run(python, "-c", "import hf_coefsfl as h; print(h.__version__, h.__file__)", cwd=tmp_path)
    assert place == f"{hf_coefsfl.__version__} {site / 'hf_coefsfl' / '__init__.py'}\n"
    listed = run(venv / "bin" / "coefsfl", "compare", "digits", "--dry_run", cwd=tmp_path)
    assert "CoeF-J" in listed and " runs, 0 of them done" in listed
