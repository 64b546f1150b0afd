"""What a release costs: mechanisms, events, accountants, calibration and the guarantee.

A library of its own: it needs numpy, scipy and dp-accounting, no other part of Coterie and no torch.
"""

from coterie.privacy import pld, rdp  # noqa: F401  they register themselves
from coterie.privacy.accounting import delta_of, epsilon_of
from coterie.privacy.calibration import calibrate
from coterie.privacy.chain import ChainHead
from coterie.privacy.cohort_sums import CohortSums, FixedSample, PoissonSample
from coterie.privacy.errors import BudgetError, CoterieError, LedgerError, PlanError, PrivacyInputError
from coterie.privacy.evaluation import EVALUATION, HeldOut
from coterie.privacy.guarantee import ClientCost, Guarantee, ReleaseCost, guarantee
from coterie.privacy.joint_scores import JointScores
from coterie.privacy.ledger import Charge, Ledger, LedgerView
from coterie.privacy.meaning import Meaning
from coterie.privacy.mechanisms import Mechanism, Multiplier, NoiseRule, NoisyScores
from coterie.privacy.plan import POPULATION, PlannedRelease, PrivacyPlan, UnitPlan, held_out
from coterie.privacy.randomness import RandomStream, SecretKey
from coterie.privacy.record_sums import (
    FullBatchSketch,
    FullBatchSteps,
    PoissonSteps,
    RecordSums,
    ShuffledSteps,
)
from coterie.privacy.released import Released
from coterie.privacy.selections import AccuracySelection, LowestLoss, ModelSelection, PrivateSelection
from coterie.privacy.sketch_sums import SketchSums
from coterie.privacy.units import Adjacency, Budget, Custody, Mode, PersonBounds, ThreatModel, Unit

__all__ = [
    "EVALUATION",
    "POPULATION",
    "AccuracySelection",
    "Adjacency",
    "Budget",
    "BudgetError",
    "ChainHead",
    "Charge",
    "ClientCost",
    "CohortSums",
    "CoterieError",
    "Custody",
    "FixedSample",
    "FullBatchSketch",
    "FullBatchSteps",
    "Guarantee",
    "HeldOut",
    "JointScores",
    "Ledger",
    "LedgerError",
    "LedgerView",
    "LowestLoss",
    "Meaning",
    "Mechanism",
    "Mode",
    "ModelSelection",
    "Multiplier",
    "NoiseRule",
    "NoisyScores",
    "PersonBounds",
    "PlanError",
    "PlannedRelease",
    "PoissonSample",
    "PoissonSteps",
    "PrivacyInputError",
    "PrivacyPlan",
    "PrivateSelection",
    "RandomStream",
    "RecordSums",
    "ReleaseCost",
    "Released",
    "SecretKey",
    "ShuffledSteps",
    "SketchSums",
    "ThreatModel",
    "Unit",
    "UnitPlan",
    "calibrate",
    "delta_of",
    "epsilon_of",
    "guarantee",
    "held_out",
]
