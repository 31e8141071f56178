"""Programs that go with exported models; they know nothing of Atoll."""
