import re

import numpy as np
import pytest
from reports import change

from atoll.kernel.randomness import generator
from atoll.report.clients import Clients
from atoll.report.html import render_page
from atoll.report.summary import write_cautions, write_findings, write_summary, write_verdict
from atoll.report.table import comparison_cells, notes

ERROR = {"name": "mean absolute error", "higher_is_better": False, "share": False}


def has(found, *parts):
    """The one sentence with all of these."""
    matching = [sentence for sentence in write_summary(found) if all(part in sentence for part in parts)]
    assert len(matching) == 1, write_summary(found)
    return matching[0]


# -- who is helped -----------------------------------------------------------------------------------------------------


def test_the_helped_and_the_harmed_are_counted_and_named(make):
    local = [0.5] * 8
    ditto = [0.7, 0.7, 0.7, 0.3, 0.7, 0.7, 0.7, 0.22]
    sentence = has(make({"local": [local], "ditto": [ditto]}), "helps")
    assert sentence == (
        "Ditto helps 6 of 8 clients compared with training alone; on average a client gains 9.0 points (p = 0.56). "
        "Clients 3 and 7 are better off alone."
    )


def test_a_loss_within_one_standard_error_is_told_apart(make):
    # of 100 samples at 0.5, one standard error of the difference is about 0.07
    found = make({"local": [[0.5] * 4], "ditto": [[0.6, 0.48, 0.3, 0.5]]})
    assert "Ditto helps 1 of 4 clients" in has(found, "helps")
    assert "2 are better off alone, 1 of them by more than one standard error: client 2." in has(found, "helps")
    mild = make({"local": [[0.5] * 3], "ditto": [[0.6, 0.48, 0.6]]})
    assert has(mild, "helps").endswith("1 is better off alone, none by more than one standard error.")
    lucky = make({"local": [[0.5] * 3], "ditto": [[0.6, 0.5, 0.6]]})
    assert has(lucky, "helps").endswith("Nobody is better off alone.")


def test_one_harmed_client_is_one(make):
    found = make({"local": [[0.5] * 3], "ditto": [[0.6, 0.1, 0.6]]})
    assert has(found, "helps").endswith("Client 1 is better off alone.")
    assert "on average a client loses 6.7 points" in has(found, "helps")


def test_of_many_harmed_clients_the_five_that_lose_most_are_named(make):
    found = make({"local": [[0.9] * 8], "ditto": [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.95, 0.05]]})
    assert "7 are better off alone, all by more than one standard error, above all clients 0, 1, 2, 3 and 7." in has(
        found, "helps"
    )


def test_seeds_with_clients_of_their_own_are_counted_seed_by_seed(make):
    scores = {"local": [[0.5] * 3] * 2, "ditto": [[0.7, 0.2, 0.7], [0.1, 0.3, 0.7]]}
    found = make(scores)
    assert has(found, "helps") == (
        "Ditto helps 1 to 2 of 3 clients (2 seeds, each with clients of its own) compared with training alone; on "
        "average a client loses 5.0 points (p = 0.66). 1 to 2 are better off alone, all by more than one standard "
        "error: client 1 (seed 0), clients 0 and 1 (seed 1)."
    )
    assert comparison_cells(found)[1][-1][8] == "1 to 2 ▼"
    assert "a range is over seeds, each of which has clients of its own" in notes(found)


def test_a_client_that_is_harmed_in_one_seed_of_three_is_counted_as_one(make):
    scores = {"local": [[0.5] * 3] * 3, "ditto": [[0.7] * 3, [0.7, 0.1, 0.7], [0.7] * 3]}
    head, more = judge(make, make(scores), {"local": 0.5, "ditto": 0.7})
    assert head.startswith("Ditto: ")
    assert more.startswith(
        "1 of 3 clients is worse off than alone by more than one standard error in one of 3 seeds: client 1 (seed 1)."
    )
    scores["ditto"][2] = [0.7, 0.7, 0.1]
    _, more = judge(make, make(scores), {"local": 0.5, "ditto": 0.7})
    assert more.startswith(
        "1 of 3 clients is worse off than alone by more than one standard error in 2 of 3 seeds: client 1 (seed 1), "
        "client 2 (seed 2)."
    )
    scores["ditto"] = [[0.7] * 3] * 3
    _, more = judge(make, make(scores), {"local": 0.5, "ditto": 0.7})
    assert more.startswith("0 of 3 clients are worse off than alone by more than one standard error in any of 3 seeds.")
    found = make({**scores, "ditto": [[0.7, 0.7, 0.1], [0.7, 0.1, 0.1], [0.1] * 3]})
    _, more = judge(make, found, {"local": 0.5, "ditto": 0.7})
    assert more.startswith(
        "1 to 3 of 3 clients are worse off than alone by more than one standard error, depending on the seed."
    )


def test_no_sentence_counts_a_part_of_a_client(make):
    draw = generator(0, "parts of clients")
    for seeds in (1, 2, 3):
        scores = {name: draw.integers(0, 10, size=(seeds, 7)) / 10 for name in ("local", "fedavg", "ditto")}
        for sentence in (*write_summary(found := make(scores)), *judge(make, found, dict.fromkeys(scores, 0.5))):
            assert not re.search(r"\d\.\d+ (of|are|is|clients?|and worse)\b", sentence), sentence


def test_a_client_is_one_client_however_many_seeds_there_are(make):
    # client 0 loses much in one seed and gains in the others; on average it gains, and is not harmed
    local, ditto = [[0.5] * 3] * 3, [[0.1, 0.2, 0.7], [0.9, 0.2, 0.7], [0.9, 0.2, 0.7]]
    found = make({"local": local, "ditto": ditto}, names=["Ada", "Grace", "Joan"])
    sentence = has(found, "helps")
    assert sentence.startswith("Ditto helps 2 of 3 clients compared with training alone;")
    assert sentence.endswith("Client Grace is better off alone.")
    assert found.find_harmed("ditto").tolist() == [[False, True, False]]
    row = found.results[-1]
    assert (row["helped"], row["harmed"]) == (2, 1)
    assert comparison_cells(found)[1][-1][8] == "1 ▼"
    assert Clients(found).harmed["ditto"].tolist() == [False, True, False]
    assert [line["harmed"] for line in found.rows() if line["method"] == "ditto"] == [False, True, False] * 3


def test_a_client_with_one_test_sample_is_named_and_not_counted_as_harmed(make):
    names, samples = ["Ada", "Grace", "Joan"], [40, 1, 60]
    found = make({"local": [[0.5, 1.0, 0.5]], "ditto": [[0.6, 0.0, 0.6]]}, names=names, samples=samples)
    assert has(found, "helps").endswith("1 is better off alone, none by more than one standard error.")
    assert has(found, "single test sample") == (
        "1 client has a single test sample (Grace), whose gain is -100, 0 or 100 points. One sample says nothing of "
        "chance, so no such client counts as harmed."
    )
    assert "Grace (1 test sample)" in render_page(found)


# -- the verdict -------------------------------------------------------------------------------------------------------


def judge(make, found, validation):
    """The verdict where methods have these mean scores on validation samples."""
    for method, value in validation.items():
        for report in found.outcomes[method]:
            test = report.figures().as_json()
            val = {**test, "macro": value}
            change(report, personal={"val": val, "test": test})
    return write_verdict(found)


SCORES = {"local": [[0.5] * 6], "fedavg": [[0.58] * 6], "ditto": [[0.7, 0.7, 0.7, 0.7, 0.7, 0.1]]}


def test_the_verdict_is_the_best_on_validation_and_says_who_is_harmed(make):
    found = make(SCORES, names=["Ada", "Grace", "Joan", "Ida", "Mary", "Emmy"])
    head, more = judge(make, found, {"local": 0.5, "fedavg": 0.6, "ditto": 0.7})
    assert head == "Ditto: +10.0 points over training alone, +2.0 points over FedAvg."
    assert more.startswith("1 of 6 clients is worse off than alone by more than one standard error: client Emmy.")
    assert "may be chance (p = 0.53)" in more
    assert more.endswith("Each client sends and receives 2.0 MB in all.")


def test_federating_may_not_pay(make):
    head, more = judge(make, make(SCORES), {"local": 0.9, "fedavg": 0.6, "ditto": 0.7})
    assert head == "Federating does not pay here: training alone is best on validation samples."
    assert more == "On test samples the best of the others, Ditto, is 10.0 points ahead of it."


def test_a_method_that_loses_on_test_samples_is_not_praised(make):
    head, more = judge(make, make({**SCORES, "ditto": [[0.46] * 6]}), {"local": 0.5, "fedavg": 0.6, "ditto": 0.7})
    assert head == "Ditto is best on validation samples, but 4.0 points behind training alone on test samples."
    assert "The loss over training alone" not in more
    assert "The loss against training alone may be chance (p = 0.062)." in more


def test_equal_scores_gain_nothing(make):
    """catches: a client that is helped by the last digit of a sum."""
    found = make({"local": [[0.3, 0.5]], "ditto": [[0.1 + 0.2, 0.5]]})
    assert has(found, "helps").startswith("Ditto helps 0 of 2 clients")


def test_nothing_is_recommended_without_validation_samples(make):
    head, _ = judge(make, make(SCORES), dict.fromkeys(SCORES, float("nan")))
    assert head.startswith("No method can be recommended: there are no validation samples")


def test_a_single_run_has_its_scores_as_verdict(make):
    head, more = write_verdict(make({"ditto": [[0.5, 0.7]]}))
    assert head == "Ditto: accuracy 60.0 % on average over 2 clients, 50.0 % for the worst of them."
    assert more == ""


def test_clients_have_their_names(make):
    found = make({"local": [[0.5] * 2], "ditto": [[0.7, 0.1]]}, names=["Ada", "Grace"])
    assert "Client Grace is better off alone." in has(found, "helps")


def test_clients_without_test_samples_count_nowhere(make):
    nan = float("nan")
    found = make({"local": [[0.5, 0.5, nan]], "ditto": [[0.7, 0.7, nan]]}, samples=[100, 100, 0])
    assert "helps 2 of 2 clients" in has(found, "helps")
    assert "1 client without test samples is" in has(found, "left out")


def test_without_local_nothing_is_said_about_harm(make):
    found = make({"fedavg": [[0.5, 0.6]], "ditto": [[0.7, 0.8]]})
    assert not [sentence for sentence in write_summary(found) if "helps" in sentence or "alone" in sentence]


def test_a_lower_score_can_be_better(make):
    found = make(
        {"local": [[1.0, 1.0]], "ditto": [[0.8, 1.5]]}, metric=ERROR, variances=[0.01, 0.01], curve=(2.0, 1.5, 1.0)
    )
    assert "Ditto helps 1 of 2 clients" in has(found, "helps")
    assert "on average a client loses 0.15 (" in has(found, "helps")
    assert "Client 1 is better off alone." in has(found, "helps")
    assert has(found, "best on average").startswith("Local is best on average (mean absolute error 1), 0.15 ahead of")
    assert "A lower mean absolute error is better" in has(found, "positive gain")


# -- who leads ---------------------------------------------------------------------------------------------------------


def test_a_lead_says_whether_it_is_more_than_chance(make):
    local = np.linspace(0.5, 0.6, 8).tolist()
    clear = make({"local": [local], "ditto": [[score + 0.1 for score in local]]})
    assert has(clear, "best on average") == (
        "Ditto is best on average (accuracy 65.0 %), 10.0 points ahead of Local, more than chance (better for 8 and "
        "worse for 0 of 8 clients, p = 0.0078)."
    )
    unclear = make({"local": [[0.5] * 4], "ditto": [[0.4, 0.7, 0.4, 0.6]]})
    assert "2.5 points ahead of Local, which may be chance (better for 2 and worse for 2" in has(unclear, "best on")


def test_a_mean_against_the_majority_is_not_called_better_than_chance(make):
    # a significant test says that most clients lose; the mean is better because one gains a lot
    local = [0.5] * 30
    ditto = [0.5 - 0.001 * number for number in range(1, 30)] + [1.0]
    found = make({"local": [local], "ditto": [ditto]})
    assert "although more clients lose than gain (better for 1 and worse for 29 of 30" in has(found, "best on average")


def test_the_lead_over_fedavg_is_said_as_well(make):
    found = make({"local": [[0.6] * 3], "fedavg": [[0.5] * 3], "ditto": [[0.7] * 3]})
    assert "10.0 points ahead of Local" in has(found, "is best on average")
    assert has(found, "ahead of FedAvg").startswith("It is 20.0 points ahead of FedAvg")


def test_p_is_that_of_the_table(make):
    scores = {
        "local": [np.linspace(0.5, 0.6, 8).tolist()],
        "ditto": [np.linspace(0.61, 0.72, 8).tolist()],
        "fedper": [np.linspace(0.55, 0.64, 8).tolist()],
    }
    found = make(scores)
    assert found.significant["local"]["ditto"] == pytest.approx(2 * 2 / 2**8)  # Holm doubles it
    assert "(p = 0.016)" in has(found, "Ditto helps")


def test_equal_means_have_no_leader(make):
    found = make({"local": [[0.5, 0.7]], "fedavg": [[0.7, 0.5]], "ditto": [[0.4, 0.4]]})
    assert "Local and FedAvg are equally good on average (accuracy 60.0 %)." in write_findings(found)
    assert not [sentence for sentence in write_summary(found) if "best on average" in sentence]


def test_the_best_on_the_servers_test_set_is_named(make):
    def found(**central):
        made = make({"local": [[0.5] * 3], "fedavg": [[0.6] * 3], "ensemble": [[0.4] * 3]})
        for method, score in central.items():
            change(made.outcomes[method][0], central={"score": score, "loss": 1.0})
        return type(made)(made.outcomes)

    alone = write_summary(found(fedavg=0.3))
    assert not any("server's own test set" in one for one in alone)  # there is nothing to compare with
    said = has(found(fedavg=0.3, ensemble=0.45), "server's own test set")
    assert said == "On the server's own test set Ensemble (45.0 %) is best, ahead of FedAvg (30.0 %)."
    said = has(found(fedavg=0.3, ensemble=0.3), "server's own test set")
    assert said == "On the server's own test set nothing is better than FedAvg (30.0 %)."


def test_one_method_has_a_level(make):
    found = make({"ditto": [[0.5, 0.7]]})
    assert write_findings(found)[0] == "Ditto: accuracy 60.0 % on average over 2 clients, 50.0 % for the worst of them."


def test_hyperparameters_are_spoken(make):
    found = make({"local": [[0.5]], "ditto:lam=0.1": [[0.6]], "ditto": [[0.7]]})
    assert "Ditto with lam=0.1 helps 1 of 1 client;" in " ".join(write_findings(found)).replace(
        " compared with training alone", ""
    )


# -- cost --------------------------------------------------------------------------------------------------------------


def test_cost_is_by_client_and_methods_that_are_alike_stand_together(make):
    found = make({"local": [[0.5] * 4], "fedavg": [[0.6] * 4], "ditto": [[0.7] * 4]})
    # 3 rounds of 2 MB in both directions, 4 clients
    assert "3.0 MB with FedAvg and Ditto, nothing with Local." in has(found, "sends and receives")


def test_the_target_is_reached_or_not(make):
    found = make({"local": [[0.5]], "fedavg": [[0.6]]}, target=0.6)
    assert "target of 60.0 % is reached by Local and FedAvg after 3 rounds." in has(found, "target")
    found = make({"local": [[0.5]], "fedavg": [[0.6]]}, target=0.9)
    assert "No method reaches the validation target of 90.0 %." in has(found, "target")
    found = make({"local": [[0.5]] * 2, "fedavg": [[0.6]] * 2})  # 95 % of 0.7, and the last three have a mean of 0.6
    assert "No method reaches a validation score 95 % as good as FedAvg's best in every seed." in has(
        found, "95 % as good"
    )


# -- care --------------------------------------------------------------------------------------------------------------


def test_few_seeds_are_said(make):
    one = make({"local": [[0.5] * 6], "ditto": [[0.6] * 6]})
    assert "only one seed" in write_cautions(one)[0]
    two = make({"local": [[0.5] * 6] * 2, "ditto": [[0.6] * 6, [0.7] * 6]})
    # differences 0.1 and 0.2: 0.15 ± 12.706 * 0.0707 / sqrt(2)
    assert "the lead of Ditto over Local is between -48.5 and +78.5 points" in write_cautions(two)[0]
    five = make({"local": [[0.5] * 6] * 5, "ditto": [[0.6] * 6] * 5})
    assert not [sentence for sentence in write_cautions(five) if "seeds are few" in sentence]


def test_few_test_samples_are_said(make):
    few = make({"local": [[0.5] * 3] * 5}, samples=[5, 10, 40])
    assert "5 to 40 test samples, half of them at most 10" in has(few, "rough")
    assert "up to 20.0 points" in has(few, "rough")
    assert not [sentence for sentence in write_cautions(make({"local": [[0.5] * 3] * 5})) if "rough" in sentence]


def test_too_few_pairs_for_a_test_are_said(make):
    assert "fewer than 6 pairs" in has(make({"local": [[0.5] * 5], "ditto": [[0.6] * 5]}), "fewer than")
    enough = make({"local": [[0.5] * 6], "ditto": [[0.6] * 6]})
    assert not [sentence for sentence in write_cautions(enough) if "pairs" in sentence]


def test_an_oracle_is_said(make):
    found = make({"local": [[0.5] * 6]}).with_selection("oracle")
    assert "chosen by their test score" in write_cautions(found)[0]


# -- the same clients in every seed ------------------------------------------------------------------------------------


def test_clients_are_the_same_by_their_data_or_their_names(make):
    scores = {"local": [[0.5, 0.7]] * 2, "ditto": [[0.6, 0.4], [0.8, 0.2]]}
    assert not make(scores).together
    assert make(scores, same=True).together
    assert make(scores, names=["a", "b"]).together
    assert not make({name: of_method[:1] for name, of_method in scores.items()}, names=["a", "b"]).together


def test_the_same_clients_are_shown_by_their_means(make):
    scores = {"local": [[0.5, 0.7]] * 2, "ditto": [[0.6, 0.72], [0.8, 0.2]]}
    one, mean = Clients(make(scores)), Clients(make(scores, same=True))
    assert one.gains["ditto"] == pytest.approx([0.1, 0.02])
    assert one.harmed["ditto"].tolist() == [False, False]
    assert mean.gains["ditto"] == pytest.approx([0.2, -0.24])
    assert mean.harmed["ditto"].tolist() == [False, True]
    assert one.words.startswith("Seed 0 only")
    assert mean.words.startswith("Means over 2 seeds")
