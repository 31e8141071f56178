"""Run PFLlib's FedAvg round by round, for `atoll bench --peer pfllib=PATH`.

This script runs in a process of its own, with the user's copy of PFLlib on its path, in a folder where PFLlib finds
the clients' data and writes its results. It knows nothing of Atoll. Every line on standard input asks for one round;
the answer is a line of JSON: the seconds of that round by PFLlib's own clock, with its evaluation, and the accuracy
that it found before training.

    python peer_pfllib.py PATH/system MODEL CLIENTS BATCH LR DEVICE
"""

import argparse
import json
import os
import sys
from pathlib import Path

NEEDED = "torch, numpy, scikit-learn, h5py and matplotlib"


def main(source: str, model: str, clients: int, batch: int, lr: float, device: str) -> None:
    """Answer requests for rounds until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - PFLlib prints as it goes
    sys.path.insert(0, source)
    try:
        import numpy as np
        import torch
        from flcore.servers.serveravg import FedAvg  # type: ignore[import-not-found]
        from flcore.trainmodel.models import DNN, FedAvgCNN  # type: ignore[import-not-found]
    except ImportError as error:
        print(json.dumps({"error": f"{error}. It needs {NEEDED}"}), file=answers, flush=True)
        return
    net = DNN(784, 100, num_classes=10) if model == "DNN" else FedAvgCNN(in_features=1, num_classes=10, dim=1024)
    with np.load("start.npz") as start, torch.no_grad():
        for mine, name in zip(net.parameters(), start.files, strict=True):
            mine.copy_(torch.from_numpy(start[name]))
    # The defaults of PFLlib's main.py, but one round at a time.
    server = FedAvg(
        argparse.Namespace(
            algorithm="FedAvg", model=net.to(device), dataset="Bench", device=device, num_classes=10, global_rounds=0,
            local_epochs=1, batch_size=batch, local_learning_rate=lr, num_clients=clients, join_ratio=1.0,
            random_join_ratio=False, few_shot=0, time_select=False, goal="bench", time_threthold=10_000.0,
            save_folder_name="items", top_cnt=100, auto_break=False, eval_gap=1, client_drop_rate=0.0,
            train_slow_rate=0.0, send_slow_rate=0.0, dlg_eval=False, dlg_gap=100, batch_num_per_client=2,
            num_new_clients=0, fine_tuning_epoch_new=0, learning_rate_decay=False, learning_rate_decay_gamma=0.99,
        ),
        times=0,
    )  # fmt: skip
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for _ in sys.stdin:
        server.Budget.append(0.0)  # it averages all but the first
        server.train()
        found = {"seconds": server.Budget[-1], "accuracy": float(server.rs_test_acc[-1])}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    source, model, clients, batch, lr, device = sys.argv[1:]
    main(source, model, int(clients), int(batch), float(lr), device)
