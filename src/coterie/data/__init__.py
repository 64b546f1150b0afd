"""Datasets and federations: who holds which records, scaled by public constants only.

A new dataset is a file with a reader; a federation says how its records are dealt to clients. No model, no
noise and nothing that depends on a client's own values beyond its records.
"""

from coterie.data.clients import Client, Federation, check_federation
from coterie.data.clusters import ClustersFederation, whole_test
from coterie.data.datasets import AnyData, DataSettings, load_dataset
from coterie.data.dirichlet import DirichletFederation
from coterie.data.federation import FederationSettings, build_federation
from coterie.data.groups import GroupsFederation
from coterie.data.natural import NaturalFederation
from coterie.data.own import OwnDataSettings, OwnFederation
from coterie.data.persons import PersonRecords
from coterie.data.records import Dataset, Owners, Persons, Records, Task

__all__ = [
    "AnyData",
    "Client",
    "ClustersFederation",
    "DataSettings",
    "Dataset",
    "DirichletFederation",
    "Federation",
    "FederationSettings",
    "GroupsFederation",
    "NaturalFederation",
    "OwnDataSettings",
    "OwnFederation",
    "Owners",
    "PersonRecords",
    "Persons",
    "Records",
    "Task",
    "build_federation",
    "check_federation",
    "load_dataset",
    "whole_test",
]
