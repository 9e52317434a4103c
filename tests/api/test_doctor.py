"""What an installation has and lacks."""

from importlib import metadata

import pytest
from packaging.requirements import Requirement

from dispfx.api.installation import doctor, package_finding


def test_a_package_is_there_too_old_or_missing():
    version = metadata.version("torch")
    assert package_finding(Requirement("torch>=2.0"), None).state == "ok"
    assert package_finding(Requirement("torch>=2.0"), None).detail == version
    old = package_finding(Requirement("torch>=99"), None)
    assert old.state == "missing" and version in old.detail and "torch>=99" in old.detail
    absent = package_finding(Requirement("no-such-package-here>=1"), "data")
    assert absent.state == "optional" and "dispfx[data]" in absent.detail


def test_requirements_of_extras_are_optional_and_those_of_other_systems_passed_over(monkeypatch):
    lines = [
        "torch>=99",
        "no-such-package-here>=1; extra == 'data'",
        "never-asked>=1; sys_platform == 'none'",
        "for-developers; extra == 'dev'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: lines)
    states = {finding.name: finding.state for finding in doctor()}
    assert states["torch"] == "missing" and states["no-such-package-here"] == "optional"
    assert "never-asked" not in states and "for-developers" not in states
    assert states["cpu"] == states["Python"] == "ok"


def test_a_checkout_that_was_not_installed_says_so(monkeypatch: pytest.MonkeyPatch):
    def absent(_: str):
        raise metadata.PackageNotFoundError("dispfx")

    monkeypatch.setattr(metadata, "requires", absent)
    assert any("checkout" in finding.detail for finding in doctor())
