"""Every method by its class.

Written by `python tests/stubs.py`; do not edit.
"""

from dataclasses import dataclass
from typing import Literal

from atoll.algorithms.abhs import ABHS as ABHS
from atoll.algorithms.abhs_local import ABHSLocal as ABHSLocal
from atoll.algorithms.abhs_rounds import ABHSRounds as ABHSRounds
from atoll.algorithms.afl import AFL as _AFL
from atoll.algorithms.apfl import APFL as APFL
from atoll.algorithms.apfl_survey import APFLSurvey as APFLSurvey
from atoll.algorithms.ccvr import CCVR as CCVR
from atoll.algorithms.ce_supcon import CESupCon as _CESupCon
from atoll.algorithms.cfl import CFL as CFL
from atoll.algorithms.coboosting import CoBoosting as _CoBoosting
from atoll.algorithms.dense import Dense as _Dense
from atoll.algorithms.ditto import Ditto as Ditto
from atoll.algorithms.ensemble import Ensemble as _Ensemble
from atoll.algorithms.fafi import FAFI as _FAFI
from atoll.algorithms.fafi_bank import FAFIBank as _FAFIBank
from atoll.algorithms.fafi_etf import FAFIETF as _FAFIETF
from atoll.algorithms.fafi_plus import FAFIPlus as _FAFIPlus
from atoll.algorithms.fafi_queue import FAFIQueue as _FAFIQueue
from atoll.algorithms.fafi_two_stage import FAFITwoStage as _FAFITwoStage
from atoll.algorithms.fcf import FCF as FCF
from atoll.algorithms.fedala import FedALA as FedALA
from atoll.algorithms.fedamp import FedAMP as FedAMP
from atoll.algorithms.fedavg import FedAvg as FedAvg
from atoll.algorithms.fedavg_ft import FedAvgFT as FedAvgFT
from atoll.algorithms.fedbabu import FedBABU as FedBABU
from atoll.algorithms.fedbn import FedBN as FedBN
from atoll.algorithms.fedcgs import FedCGS as _FedCGS
from atoll.algorithms.fedcr import FedCR as FedCR
from atoll.algorithms.fedcvae import FedCVAE as _FedCVAE
from atoll.algorithms.feddf import FedDF as FedDF
from atoll.algorithms.feddyn import FedDyn as FedDyn
from atoll.algorithms.fedetf import FedETF as _FedETF
from atoll.algorithms.fedfomo import FedFomo as FedFomo
from atoll.algorithms.fedfsa import FedFSA as FedFSA
from atoll.algorithms.fedgen import FedGen as FedGen
from atoll.algorithms.fedgen_local import FedGenLocal as FedGenLocal
from atoll.algorithms.fedic import FEDIC as _FEDIC
from atoll.algorithms.fedlpa import FedLPA as _FedLPA
from atoll.algorithms.fedmask import FedMask as FedMask
from atoll.algorithms.fedmd import FedMD as FedMD
from atoll.algorithms.fedmf import FedMF as FedMF
from atoll.algorithms.fedncf import FedNCF as FedNCF
from atoll.algorithms.fedora import Fedora as Fedora
from atoll.algorithms.fedora_items import FedoraItems as FedoraItems
from atoll.algorithms.fedov import FedOV as _FedOV
from atoll.algorithms.fedpac import FedPAC as FedPAC
from atoll.algorithms.fedper import FedPer as FedPer
from atoll.algorithms.fedpft import FedPFT as _FedPFT
from atoll.algorithms.fedphp import FedPHP as FedPHP
from atoll.algorithms.fedproto import FedProto as FedProto
from atoll.algorithms.fedprox import FedProx as FedProx
from atoll.algorithms.fedrap import FedRAP as FedRAP
from atoll.algorithms.fedrep import FedRep as FedRep
from atoll.algorithms.fedrod import FedRoD as FedRoD
from atoll.algorithms.fedsam import FedSAM as FedSAM
from atoll.algorithms.fedsmoo import FedSMOO as FedSMOO
from atoll.algorithms.fedspeed import FedSpeed as FedSpeed
from atoll.algorithms.flhc import FLHC as FLHC
from atoll.algorithms.fml import FML as FML
from atoll.algorithms.gpfedrec import GPFedRec as GPFedRec
from atoll.algorithms.ifca import IFCA as IFCA
from atoll.algorithms.intactofl import IntactOFL as _IntactOFL
from atoll.algorithms.interp import Interp as Interp
from atoll.algorithms.interp_bandit import InterpBandit as InterpBandit
from atoll.algorithms.knn_per import KNNPer as KNNPer
from atoll.algorithms.kt_pfl import KTpFL as KTpFL
from atoll.algorithms.lg_fedavg import LGFedAvg as LGFedAvg
from atoll.algorithms.local import Local as Local
from atoll.algorithms.local_items import LocalItems as LocalItems
from atoll.algorithms.maml import MAML as MAML
from atoll.algorithms.mocha import Mocha as Mocha
from atoll.algorithms.mofedsam import MoFedSAM as MoFedSAM
from atoll.algorithms.mtfl import MTFL as MTFL
from atoll.algorithms.mtfl_adam import MTFLAdam as MTFLAdam
from atoll.algorithms.mtl_reg import MTLReg as MTLReg
from atoll.algorithms.oneshot_avg import OneShotAvg as _OneShotAvg
from atoll.algorithms.oneshot_df import OneShotDF as _OneShotDF
from atoll.algorithms.oneshot_margins import OneShotMargins as _OneShotMargins
from atoll.algorithms.oneshot_proto import OneShotProto as _OneShotProto
from atoll.algorithms.otfusion import OTFusion as _OTFusion
from atoll.algorithms.perfedavg import PerFedAvg as PerFedAvg
from atoll.algorithms.pfedhn import PFedHN as PFedHN
from atoll.algorithms.pfedme import PFedMe as PFedMe
from atoll.algorithms.pfedme_survey import PFedMeSurvey as PFedMeSurvey
from atoll.algorithms.pfedrec import PFedRec as PFedRec
from atoll.algorithms.regmean import RegMean as _RegMean
from atoll.algorithms.reptile import Reptile as Reptile
from atoll.algorithms.rga import RGA as _RGA
from atoll.algorithms.scaffold import Scaffold as Scaffold
from atoll.algorithms.sub_fedavg import SubFedAvg as SubFedAvg

@dataclass(frozen=True, kw_only=True)
class AFL(_AFL):
    """Ridge regression on the features of all clients, from sums."""

    features: Literal["initial", "public"] = "initial"
    public_epochs: int = 10
    width: int | None = None
    gamma: float = 1.0

@dataclass(frozen=True, kw_only=True)
class CESupCon(_CESupCon):
    """An ensemble of models that were trained with a contrast of views."""

    epochs: int = 10
    lam: float = 1.0
    temperature: float = 0.07
    of: Literal["logits", "probs"] = "logits"
    weighting: Literal["samples", "sqrt", "uniform", "classes"] = "uniform"

@dataclass(frozen=True, kw_only=True)
class CoBoosting(_CoBoosting):
    """Distillation on hard samples from an ensemble with votes."""

    epochs: int = 10
    server_epochs: int = 10
    server_batch: int = 128
    server_lr: float = 0.01
    temperature: float = 4.0
    generator_steps: int = 10
    generator_lr: float = 0.001
    noise: int = 256
    width: int = 64
    statistics: float = 1.0
    adversarial: float = 1.0
    vote_lr: float = 0.01
    vote_decay: float = 0.99
    diversity: float = 0.03137254901960784

@dataclass(frozen=True, kw_only=True)
class Dense(_Dense):
    """Data-free distillation of the clients' ensemble into one student."""

    epochs: int = 10
    server_epochs: int = 10
    server_batch: int = 128
    server_lr: float = 0.01
    temperature: float = 4.0
    generator_steps: int = 10
    generator_lr: float = 0.001
    noise: int = 256
    width: int = 64
    statistics: float = 1.0
    adversarial: float = 1.0

@dataclass(frozen=True, kw_only=True)
class Ensemble(_Ensemble):
    """All clients' models, heard together."""

    epochs: int = 10
    of: Literal["logits", "probs"] = "logits"
    weighting: Literal["samples", "sqrt", "uniform", "classes"] = "uniform"

@dataclass(frozen=True, kw_only=True)
class FAFI(_FAFI):
    """Encoders and prototypes, trained by contrast; features are fused."""

    epochs: int = 10
    profile: Literal["clean", "faithful"] = "clean"
    contrast: float = 1.0
    separation: float = 1.0
    temperature: float | None = None
    scale: float | None = None
    double_ce: bool | None = None
    normal_start: bool | None = None
    momentum_reset: bool | None = None
    drop_last: bool | None = None
    falling: bool = False
    batch_statistics: bool | None = None
    averaging: Literal["all", "owners", "volume"] | None = None
    least: int = 1
    fusion: Literal["size", "uniform", "iffi", "iffi_code"] | None = None
    normalise: bool | None = None
    noise: int = 8

@dataclass(frozen=True, kw_only=True)
class FAFIBank(_FAFIBank):
    """FAFI with a bank of public features among the negatives."""

    epochs: int = 10
    profile: Literal["clean", "faithful"] = "clean"
    contrast: float = 1.0
    separation: float = 1.0
    temperature: float | None = None
    scale: float | None = None
    double_ce: bool | None = None
    normal_start: bool | None = None
    momentum_reset: bool | None = None
    drop_last: bool | None = None
    falling: bool = False
    pool: Literal["none", "features", "images", "anchored", "means", "labelled"] = "features"
    pool_from: Literal["teacher", "untrained", "random", "noise"] = "teacher"
    pool_size: int = 4096
    pool_draw: int = 256
    masked: bool = False
    mass: float = 0.0
    teacher_epochs: int = 20
    batch_statistics: bool | None = None
    averaging: Literal["all", "owners", "volume"] | None = None
    least: int = 1
    fusion: Literal["size", "uniform", "iffi", "iffi_code"] | None = None
    normalise: bool | None = None
    noise: int = 8

@dataclass(frozen=True, kw_only=True)
class FAFIETF(_FAFIETF):
    """FAFI with the corners of a simplex as fixed directions of classes."""

    epochs: int = 10
    profile: Literal["clean", "faithful"] = "clean"
    contrast: float = 1.0
    separation: float = 1.0
    temperature: float | None = None
    scale: float | None = None
    double_ce: bool | None = None
    normal_start: bool | None = None
    momentum_reset: bool | None = None
    drop_last: bool | None = None
    falling: bool = False
    anchors: Literal["none", "etf", "random"] = "etf"
    anchor: float = 1.0
    anchor_loss: Literal["direction", "mse"] = "direction"
    anchor_schedule: Literal["linear", "cosine", "constant", "auto"] = "linear"
    anchor_moves: bool = False
    batch_statistics: bool | None = None
    averaging: Literal["all", "owners", "volume"] | None = None
    least: int = 1
    fusion: Literal["size", "uniform", "iffi", "iffi_code"] | None = None
    normalise: bool | None = None
    noise: int = 8

@dataclass(frozen=True, kw_only=True)
class FAFIPlus(_FAFIPlus):
    """FAFI and everything that can be added to it."""

    epochs: int = 10
    profile: Literal["clean", "faithful"] = "clean"
    contrast: float = 1.0
    separation: float = 1.0
    temperature: float | None = None
    scale: float | None = None
    double_ce: bool | None = None
    normal_start: bool | None = None
    momentum_reset: bool | None = None
    drop_last: bool | None = None
    falling: bool = False
    pool: Literal["none", "features", "images", "anchored", "means", "labelled"] = "none"
    pool_from: Literal["teacher", "untrained", "random", "noise"] = "teacher"
    pool_size: int = 4096
    pool_draw: int = 256
    masked: bool = True
    mass: float = 1.0
    teacher_epochs: int = 20
    stages: Literal["never", "once", "recurring"] = "never"
    stage_share: float = 0.2
    contrast_after: float | None = None
    queue: int = 0
    queue_same: Literal["ignored", "positives", "blind"] = "ignored"
    decay: float = 0.99
    queue_momentum: float = 0.0
    anchors: Literal["none", "etf", "random"] = "none"
    anchor: float = 1.0
    anchor_loss: Literal["direction", "mse"] = "direction"
    anchor_schedule: Literal["linear", "cosine", "constant", "auto"] = "linear"
    anchor_moves: bool = False
    hardness: float = 0.0
    synthetic: bool = False
    balanced: bool = False
    prior: Literal["none", "balanced", "restricted"] = "none"
    rarity: float = 0.0
    rarity_by: Literal["weights", "draws"] = "weights"
    reference: Literal["none", "mmd", "coral", "sliced"] = "none"
    reference_weight: float = 1.0
    reference_by: Literal["prior", "class"] = "prior"
    conflict: Literal["ignored", "measured", "projected"] = "ignored"
    batch_statistics: bool | None = None
    averaging: Literal["all", "owners", "volume"] | None = None
    least: int = 1
    fusion: Literal["size", "uniform", "iffi", "iffi_code"] | None = None
    normalise: bool | None = None
    noise: int = 8
    own: float = 0.0
    own_by: Literal["prototypes", "margins"] = "prototypes"
    dynamic: bool = False
    refine: int = 0
    refine_labels: bool = True

@dataclass(frozen=True, kw_only=True)
class FAFIQueue(_FAFIQueue):
    """FAFI with a queue of negatives."""

    epochs: int = 10
    profile: Literal["clean", "faithful"] = "clean"
    contrast: float = 1.0
    separation: float = 1.0
    temperature: float | None = None
    scale: float | None = None
    double_ce: bool | None = None
    normal_start: bool | None = None
    momentum_reset: bool | None = None
    drop_last: bool | None = None
    falling: bool = False
    queue: int = 4096
    queue_same: Literal["ignored", "positives", "blind"] = "ignored"
    decay: float = 0.99
    queue_momentum: float = 0.0
    mass: float = 1.0
    batch_statistics: bool | None = None
    averaging: Literal["all", "owners", "volume"] | None = None
    least: int = 1
    fusion: Literal["size", "uniform", "iffi", "iffi_code"] | None = None
    normalise: bool | None = None
    noise: int = 8

@dataclass(frozen=True, kw_only=True)
class FAFITwoStage(_FAFITwoStage):
    """Contrast with a public bank, and then FAFI."""

    epochs: int = 10
    profile: Literal["clean", "faithful"] = "clean"
    contrast: float = 1.0
    separation: float = 1.0
    temperature: float | None = None
    scale: float | None = None
    double_ce: bool | None = None
    normal_start: bool | None = None
    momentum_reset: bool | None = None
    drop_last: bool | None = None
    falling: bool = False
    pool: Literal["none", "features", "images", "anchored", "means", "labelled"] = "features"
    pool_from: Literal["teacher", "untrained", "random", "noise"] = "teacher"
    pool_size: int = 4096
    pool_draw: int = 256
    masked: bool = False
    mass: float = 0.0
    teacher_epochs: int = 20
    stages: Literal["never", "once", "recurring"] = "once"
    stage_share: float = 0.2
    contrast_after: float | None = None
    batch_statistics: bool | None = None
    averaging: Literal["all", "owners", "volume"] | None = None
    least: int = 1
    fusion: Literal["size", "uniform", "iffi", "iffi_code"] | None = None
    normalise: bool | None = None
    noise: int = 8

@dataclass(frozen=True, kw_only=True)
class FedCGS(_FedCGS):
    """A Gaussian head on the features of all clients, from sums."""

    features: Literal["initial", "public"] = "initial"
    public_epochs: int = 10
    width: int | None = None
    covariance: Literal["within", "total"] = "within"
    shrinkage: float = 0.01

@dataclass(frozen=True, kw_only=True)
class FedCVAE(_FedCVAE):
    """One classifier, trained on samples from all clients' decoders."""

    epochs: int = 10
    latent: int = 10
    hidden: int = 128
    lr: float = 0.001
    center: float = 0.0
    variant: Literal["ens", "kd"] = "ens"
    reach: float = 3.0
    samples: int = 1000
    server_batch: int = 32
    server_epochs: int = 5
    decoder_epochs: int = 5

@dataclass(frozen=True, kw_only=True)
class FedETF(_FedETF):
    """Models that were trained to one fixed classifier."""

    epochs: int = 10
    scale: float = 1.0
    balanced: bool = True
    weighting: Literal["samples", "sqrt", "uniform", "classes"] = "uniform"
    answer: Literal["ensemble", "average"] = "ensemble"

@dataclass(frozen=True, kw_only=True)
class FEDIC(_FEDIC):
    """A student of a calibrated ensemble."""

    epochs: int = 10
    labelled: float = 0.2
    fit_epochs: int = 20
    fit_batch: int = 20
    student: Literal["fresh", "average"] = "fresh"
    server_epochs: int = 60
    server_batch: int = 128
    server_lr: float = 0.001
    temperature: float = 2.0

@dataclass(frozen=True, kw_only=True)
class FedLPA(_FedLPA):
    """One-shot training, and layers merged as the most likely ones under all clients' posteriors."""

    epochs: int = 10
    damping: float = 0.001
    iterations: int = 500

@dataclass(frozen=True, kw_only=True)
class FedOV(_FedOV):
    """All clients' models, each heard by how little it says "unknown"."""

    epochs: int = 10
    destroyed: float = 1.0
    adversarial: float = 1.0
    placeholder: float = 1.0
    attack_steps: int = 5
    attack_size: float = 0.004
    augmented: bool = True
    heard: int = 0

@dataclass(frozen=True, kw_only=True)
class FedPFT(_FedPFT):
    """A head trained on features drawn from the clients' mixtures."""

    features: Literal["initial", "public"] = "initial"
    public_epochs: int = 10
    width: int | None = None
    components: int = 10
    iterations: int = 30
    shrinkage: float = 1.0
    server_epochs: int = 50
    server_batch: int = 128
    server_lr: float = 0.01
    momentum: float = 0.9

@dataclass(frozen=True, kw_only=True)
class IntactOFL(_IntactOFL):
    """A mixture of the clients' models as experts."""

    epochs: int = 10
    server_epochs: int = 10
    server_batch: int = 128
    server_lr: float = 0.01
    temperature: float = 4.0
    generator_steps: int = 10
    generator_lr: float = 0.001
    noise: int = 256
    width: int = 64
    statistics: float = 1.0
    adversarial: float = 1.0
    data: Literal["generated", "public"] = "generated"
    gate: Literal["softmax", "linear"] = "softmax"
    balance: float = 0.01
    diversity: float = 0.03137254901960784

@dataclass(frozen=True, kw_only=True)
class OneShotAvg(_OneShotAvg):
    """The average of models that were trained apart."""

    epochs: int = 10
    weighting: Literal["samples", "sqrt", "uniform"] = "samples"
    batchnorm: Literal["pooled", "mean", "public"] = "pooled"

@dataclass(frozen=True, kw_only=True)
class OneShotDF(_OneShotDF):
    """One model that was taught the ensemble's answers."""

    epochs: int = 10
    of: Literal["logits", "probs", "margins"] = "logits"
    weighting: Literal["samples", "sqrt", "uniform", "classes"] = "uniform"
    student: Literal["average", "best", "fresh"] = "average"
    server_epochs: int = 40
    server_batch: int = 128
    server_lr: float = 0.001

@dataclass(frozen=True, kw_only=True)
class OneShotMargins(_OneShotMargins):
    """All clients' models, whose answers are put on one scale."""

    epochs: int = 10
    shrinkage: float = 0.25
    scale: float = 16.0
    common: bool = True
    voting: Literal["discernment", "classes", "uniform"] = "discernment"

@dataclass(frozen=True, kw_only=True)
class OneShotProto(_OneShotProto):
    """Nearest prototypes of fused features."""

    epochs: int = 10
    encoder: Literal["ensemble", "average"] = "ensemble"
    weighting: Literal["samples", "sqrt", "uniform"] = "samples"
    prototypes: Literal["samples", "batches", "uniform"] = "uniform"

@dataclass(frozen=True, kw_only=True)
class OTFusion(_OTFusion):
    """The average of models whose neurons were matched."""

    epochs: int = 10
    weighting: Literal["samples", "sqrt", "uniform"] = "samples"

@dataclass(frozen=True, kw_only=True)
class RegMean(_RegMean):
    """One-shot training, and linear layers merged by least squares on their inputs."""

    epochs: int = 10
    damping: float = 0.9

@dataclass(frozen=True, kw_only=True)
class RGA(_RGA):
    """Nearest prototypes of standardised features."""

    epochs: int = 10
    moments: Literal["training", "public"] = "training"
    weighting: Literal["samples", "sqrt", "uniform"] = "sqrt"
    prototypes: Literal["frame", "means"] = "frame"
