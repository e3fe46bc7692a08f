"""The places in which the tests of this folder happen."""

from tests.bad_input.launching import launch_folder, scene

__all__ = ["launch_folder", "scene"]
