"""Principal components of a few very long vectors, computed exactly.

A federation has tens of clients and a model tens of thousands of parameters or more, so the components
come from the clients' Gram matrix. Randomised solvers, the usual choice for such shapes, lose clusters
that the exact decomposition still shows at the same noise.
"""

import numpy as np
from numpy.typing import NDArray


def principal_components(vectors: NDArray[np.floating], dimensions: int) -> NDArray[np.float64]:
    """Coordinates (one row per vector) along the directions of largest variance, in the vectors' units."""
    return components_of(centred_gram(vectors), dimensions)


def centred_gram(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Inner products of the vectors less their mean."""
    centred = np.asarray(vectors, dtype=np.float64)
    centred = centred - centred.mean(axis=0)
    return np.asarray(centred @ centred.T)


def components_of(gram: NDArray[np.float64], dimensions: int) -> NDArray[np.float64]:
    """Principal components of vectors with these (centred) inner products.

    The sign of each component is fixed (largest entry positive), so equal input gives equal output.
    """
    eigenvalues, eigenvectors = np.linalg.eigh(gram)
    order = np.argsort(eigenvalues)[::-1][:dimensions]
    coordinates = eigenvectors[:, order] * np.sqrt(np.clip(eigenvalues[order], 0.0, None))
    largest = np.argmax(np.abs(coordinates), axis=0)
    signs = np.sign(coordinates[largest, np.arange(coordinates.shape[1])])
    return np.asarray(coordinates * np.where(signs == 0, 1.0, signs))
