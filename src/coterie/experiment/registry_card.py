"""A card in the form of the OpenDP registry of deployments: its fields, filled from ours."""

import re
from typing import Any

from coterie.experiment.card import PrivacyClaim
from coterie.privacy import Custody, Unit
from coterie.privacy.meaning import percent_up
from coterie.privacy.units import number_to_json, round_up, short_number

OPEN = "to be answered by the operator (card.yaml)"
_UNITS = {
    Unit.RECORD: "Event",
    Unit.PERSON: "User",
    Unit.CLIENT: "Organization",
    Unit.WORKER: "Organization",
}


def registry(card: PrivacyClaim) -> dict[str, Any]:
    """What the registry asks of a deployment; what only the operator knows is said to be open."""
    told, promise, answers = card.content, card.promise, card.answers

    def said(key: str) -> str:
        return answers.get(key) or OPEN

    name = answers.get("name") or told["run"]
    federated = promise.held_by in (Custody.EACH_SITE, Custody.TRUSTED_SERVER)
    releases = sum(release.times for release in promise.releases)
    rows = [
        f"{release.what}: {release.times} times, {release.noise}, epsilon {round_up(release.epsilon)} alone"
        for release in promise.releases
    ]
    history = told["history"]["text"]
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model",
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": {
                "name": name,
                "data_curators": answers.listed("data_curators") or [OPEN],
                "intended_use": said("intended_use"),
                "data_product_type": "Machine learning model",
                "data_product_region": said("data_product_region"),
                "description": said("description"),
                "publication_date": said("publication_date"),
                "data_product_sector": said("data_product_sector"),
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": _domain(told),
                "unprotected_quantities": "; ".join(told["unprotected"]),
            },
            "privacy_loss": {
                "privacy_unit": _UNITS[promise.unit],
                "privacy_unit_details": f"{promise.protected}; {told['neighbours']['text']}",
                "privacy_parameters": {
                    "epsilon": number_to_json(promise.epsilon),
                    "delta": promise.delta,
                    "rho": None,
                },
                "privacy_parameters_details": (
                    f"{promise.line}. At delta 1e-5: epsilon {_up(told['epsilon_at_1e-5'])}. {history}"
                ),
            },
            "deployment_model": {
                "model_name": "Federated" if federated else "Central",
                "model_name_details": told["trusted"]["text"],
                "actors": (
                    f"observer: {told['observer']['who']}, seeing {told['observer']['sees']}; trusted: "
                    f"{told['trusted']['who']}"
                ),
                "release_type": "Many releases" if releases > 1 else "One release",
                "release_type_details": f"{releases} releases of the unit that spends most, all composed",
                "data_source_type": "Static",
                "data_source_type_details": (
                    f"{told['data']['source']}; {told['data']['declared_columns_only']}"
                ),
                "access_type": "Non-interactive",
                "access_type_details": "models and released values; nobody may ask queries",
            },
            "accounting": {
                "post_processing": "averaging, clustering and choice of models work on released values alone",
                "composition": f"{promise.accountant}, all planned releases composed; {history}",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": (
                    f"values are clipped to declared ranges; hyper-parameters: {said('tuning')}"
                ),
                "mechanisms": "; ".join(rows) or "none",
                "justification": said("justification"),
            },
            "administrative": {
                "sources": answers.listed("sources") or [OPEN],
                "notes": _notes(told),
                "registry_authors": answers.listed("registry_authors") or [OPEN],
            },
        },
    }


def _up(epsilon: object) -> str:
    return round_up(float(str(epsilon)))


def _domain(told: dict[str, Any]) -> str:
    records = sum(row.get("records") or 0 for row in told["per_client"].values())
    return f"{told['data']['declared_columns_only']}; {len(told['per_client'])} holders, {records:,} records"


def _notes(told: dict[str, Any]) -> str:
    """What stands beside the guarantee."""
    meaning = told["meaning"]
    return " ".join(
        [
            f"Written by coterie {told['version']}.",
            f"Whoever guesses at even odds is right at most {percent_up(meaning['guess_at_even_odds'])} of "
            f"the time; accusing 1 % of others finds at most {percent_up(meaning['true_positive_rate'])}.",
            f"Not private: {'; '.join(told['not_private']) or 'nothing'}.",
            f"Audit: {told['audit'] if isinstance(told['audit'], str) else told['audit']['verdict']}.",
            f"Delta {short_number(told['delta'])}.",
        ]
    )
