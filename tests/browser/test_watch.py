"""The page of a run that goes on, in a real browser: it reloads by itself."""

import threading

from playwright.sync_api import Browser

from atoll import federate
from atoll.data.recipe import Recipe
from atoll.experiments.watching import serve


def test_the_page_reloads_when_the_run_has_got_further(browser: Browser, tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def wait(line):
        if line.round == 1:
            begun.set()
            go_on.wait(60)

    asked = {"rounds": 2, "eval_every": 1, "folder": tmp_path, "on_round": wait, "stop": threading.Event()}
    task = Recipe("digits", clients=3, samples=300).build()
    work = threading.Thread(target=federate, args=(task, "fedavg"), kwargs={**asked, "progress": False})
    work.start()
    assert begun.wait(60)
    with serve(tmp_path) as server, browser.new_context() as context:
        threading.Thread(target=server.serve_forever).start()
        complaints: list[str] = []
        context.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        context.on("weberror", lambda error: complaints.append(str(error.error)))
        shown = context.new_page()
        shown.goto(server.address)
        assert "1 of 2 rounds" in shown.get_by_role("alert").inner_text()
        with shown.expect_response("**/version"):  # the page knows where it is
            pass
        go_on.set()
        work.join()
        shown.get_by_text("All runs are finished.").wait_for(timeout=20_000)
        assert shown.get_by_role("alert").count() == 0
        assert not complaints
        server.shutdown()
