from __future__ import annotations

from importlib import metadata

import pytest

from skylite.optional_packages import install_command


def test_the_packages_of_an_extra_are_named_and_skylite_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install skylite[wandb]` installs another project where skylite is missing."""
    mlflow = ["mlflow-skinny>=3.17 ; extra == 'mlflow'", "alembic<2 ; extra == 'mlflow'"]
    needed = ["rich>=15", *mlflow, "wandb; extra == 'wandb'"]
    monkeypatch.setattr(metadata, "requires", lambda _: needed)
    assert install_command("mlflow") == "pip install 'mlflow-skinny>=3.17' 'alembic<2'"
    assert install_command("wandb") == "pip install wandb"
