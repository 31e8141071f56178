"""Tables, pages and figures made from runs."""
