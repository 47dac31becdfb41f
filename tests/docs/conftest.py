from tests.examples.conftest import checkpoint as checkpoint
