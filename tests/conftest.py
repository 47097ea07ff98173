import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.gloo.pool import Pool

# `HYPOTHESIS_PROFILE=thorough pytest` looks at many more examples.
common = dict(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.register_profile("fast", max_examples=8, derandomize=True, **common)
settings.register_profile("thorough", max_examples=200, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()
