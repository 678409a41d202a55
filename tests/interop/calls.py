"""Calls of other libraries, by library and name. `a` makes an array of numpy's, so that one call serves both."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Callable[[Any], Any]
Call = Callable[[Array], Any]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(12, 4))
POSITIVE = np.abs(X) + 0.1
UNIT = np.clip(POSITIVE / 4, 0.01, 0.99)
CUBE = RANDOM.normal(size=(2, 3, 4))
VECTOR = np.sort(RANDOM.normal(size=9))
SQUARE = X[:4] @ X[:4].T + 4 * np.eye(4)
CLASSES = RANDOM.integers(0, 3, 12)
OTHER_CLASSES = np.where(RANDOM.random(12) < 0.3, 2 - CLASSES, CLASSES)
BINARY = (X[:, 0] > 0).astype(np.int64)
TARGET = X @ np.arange(4.0) + 0.1 * RANDOM.normal(size=12)


def calls_of(library: str) -> dict[str, Call]:
    """The calls of a library; one whose function this version of it lacks is left out."""
    return {name: call for name, call in LIBRARIES[library]().items() if call is not None}


def functions(module: str, names: str, *arguments: Any, **options: Any) -> dict[str, Any]:
    """A call of each function of a module, with these arguments."""
    found = importlib.import_module(module)
    short = module.partition(".")[2]

    def call(name: str) -> Call | None:
        function = getattr(found, name, None)
        if function is None:
            return None
        return lambda a: function(*[a(x) if isinstance(x, np.ndarray) else x for x in arguments], **options)

    return {f"{short}.{name}" if short else name: call(name) for name in names.split()}


def einops() -> dict[str, Any]:
    from einops import array_api

    return {
        "array_api.rearrange": lambda a: array_api.rearrange(a(CUBE), "a b c -> (a c) b"),
        "array_api.rearrange of a list": lambda a: array_api.rearrange([a(CUBE), a(CUBE)], "l a b c -> a (l b) c"),
        "array_api.reduce": lambda a: [
            array_api.reduce(a(CUBE), "a b c -> b ()", kind) for kind in ("sum", "mean", "min", "max", "prod")
        ],
        "array_api.repeat": lambda a: array_api.repeat(a(CUBE), "a b c -> a (2 b) c d", d=3),
        "array_api.pack": lambda a: array_api.pack([a(CUBE), a(CUBE[0])], "* b c")[0],
        "array_api.unpack": lambda a: array_api.unpack(a(CUBE), [(1,), ()], "* b c"),
        "array_api.asnumpy": lambda a: array_api.asnumpy(a(CUBE)),
    }


def array_api_compat() -> dict[str, Any]:
    import array_api_compat as compat

    def namespace(a: Array) -> Any:
        xp = compat.array_namespace(a(X), a(VECTOR), 1.0)
        return xp.sum(a(X), axis=0), xp.astype(a(CLASSES), xp.float64), xp.concat([a(VECTOR), a(VECTOR)])

    return {
        "array_namespace": namespace,
        "device, to_device": lambda a: compat.to_device(a(X) * 2, compat.device(a(X))),
        "size": lambda a: compat.size(a(X)),
        "is_array_api_obj": lambda a: [compat.is_array_api_obj(a(X)), compat.is_writeable_array(a(X))],
    }


def array_api_extra() -> dict[str, Any]:
    import array_api_extra as xpx

    x = "array_api_extra"
    return {
        **functions(x, "angle nan_to_num sinc deg2rad rad2deg", X),
        **functions(x, "nanmax nanmin nansum nanmean nunique", X),
        **functions(x, "cov create_diagonal", X),
        **functions(x, "atleast_nd", VECTOR, ndim=3),
        **functions(x, "pad", X, 2, constant_values=1.5),
        **functions(x, "partition", VECTOR[::-1].copy(), 4),
        **functions(x, "isclose", X, X + 1e-12),
        **functions(x, "kron", X[:2], X[:3]),
        **functions(x, "isin searchsorted", VECTOR, VECTOR[2:4]),
        **functions(x, "setdiff1d union1d", VECTOR, VECTOR[2:4]),
        "one_hot": lambda a: xpx.one_hot(a(CLASSES), 3, dtype=a(X).dtype),
        "apply_where": lambda a: xpx.apply_where(a(X) > 0, a(X), lambda z: z * 2, lambda z: -z),
        "at(…).set": lambda a: xpx.at(a(X), (0, slice(0, 2))).set(1.5, copy=True),
        "at(…).add": lambda a: xpx.at(a(X))[1].add(1.5, copy=True),
        "at(mask).set": lambda a: xpx.at(a(X), a(X > 0)).set(0.0, copy=True),
        "argpartition": lambda a: a(VECTOR)[xpx.argpartition(a(VECTOR), 4)[4]],
        "lazy_apply": lambda a: xpx.lazy_apply(np.sin, a(X), as_numpy=True),
    }


def scipy() -> dict[str, Any]:
    from scipy import integrate, spatial

    one_array = "erf erfc expit logit gammaln digamma ndtr log_ndtr entr i0 i0e i1 j0 exprel softmax log_softmax"
    moments = "zscore gzscore skew kurtosis moment gmean hmean variation sem tmean tvar tstd tmin tmax entropy"
    return {
        **functions("scipy.special", f"{one_array} logsumexp", UNIT),
        **functions("scipy.special", "rel_entr xlogy betaln stdtr", POSITIVE, UNIT),
        **functions("scipy.stats", f"{moments} describe gstd kstat circmean circvar circstd iqr rankdata", POSITIVE),
        **functions("scipy.stats", "skewtest kurtosistest normaltest jarque_bera", X[:, 0]),
        **functions("scipy.stats", "pearsonr", VECTOR, VECTOR**3),
        **functions("scipy.stats", "zmap ttest_ind ttest_rel", X, POSITIVE),
        **functions("scipy.stats", "ttest_1samp", X, 0.25),
        **functions("scipy.stats", "pmean", POSITIVE, 3),
        **functions("scipy.stats", "chisquare", POSITIVE),
        **functions("scipy.fft", "fft ifft rfft dct", VECTOR),
        **functions("scipy.ndimage", "gaussian_filter sobel", X, 1),
        **functions("scipy.signal", "convolve correlate fftconvolve", VECTOR, VECTOR[:3]),
        **functions("scipy.signal", "detrend hilbert", X),
        **functions("scipy.integrate", "trapezoid simpson cumulative_trapezoid", X),
        "integrate.cumulative_simpson": lambda a: integrate.cumulative_simpson(a(X), dx=a(np.full((12, 1), 0.3))),
        **functions("scipy.linalg", "inv det svdvals expm", SQUARE),
        **functions("scipy.optimize", "rosen rosen_der", VECTOR),
        **functions("scipy.cluster.vq", "whiten", X),
        **functions("scipy.cluster.vq", "vq", X, X[:3]),
        **functions("scipy.constants", "convert_temperature", X, "C", "K"),
        "spatial.transform.Rotation": lambda a: spatial.transform.Rotation.from_rotvec(a(X[:, :3])).as_matrix(),
    }


def sklearn() -> dict[str, Any]:
    from sklearn import decomposition, linear_model, mixture, model_selection, naive_bayes, preprocessing
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    classification = "accuracy_score balanced_accuracy_score zero_one_loss hamming_loss confusion_matrix"
    averaged = "f1_score precision_score recall_score"
    regression = "mean_squared_error root_mean_squared_error mean_absolute_error mean_absolute_percentage_error"
    regression += " max_error mean_squared_log_error mean_pinball_loss median_absolute_error mean_tweedie_deviance"
    regression += " r2_score explained_variance_score"
    kernels = "cosine_similarity cosine_distances euclidean_distances manhattan_distances linear_kernel"
    kernels += " polynomial_kernel rbf_kernel sigmoid_kernel laplacian_kernel chi2_kernel additive_chi2_kernel"
    kernels += " paired_cosine_distances paired_euclidean_distances"

    def transformed(estimator: Any, x: np.ndarray[Any, Any]) -> Call:
        return lambda a: estimator.fit_transform(a(x))

    def predicted(estimator: Any, y: np.ndarray[Any, Any]) -> Call:
        return lambda a: estimator.fit(a(X), a(y)).predict(a(X))

    return {
        **functions("sklearn.metrics", classification, CLASSES, OTHER_CLASSES),
        **functions("sklearn.metrics", averaged, CLASSES, OTHER_CLASSES, average="macro"),
        **functions("sklearn.metrics", "roc_auc_score log_loss brier_score_loss", BINARY, UNIT[:, 0]),
        **functions("sklearn.metrics", regression, POSITIVE[:, 0], POSITIVE[:, 1]),
        **functions("sklearn.metrics.pairwise", kernels, POSITIVE, POSITIVE[::-1].copy()),
        "preprocessing.StandardScaler": transformed(preprocessing.StandardScaler(), X),
        "preprocessing.MinMaxScaler": transformed(preprocessing.MinMaxScaler(), X),
        "preprocessing.MaxAbsScaler": transformed(preprocessing.MaxAbsScaler(), X),
        "preprocessing.Normalizer": transformed(preprocessing.Normalizer(), X),
        "preprocessing.Binarizer": transformed(preprocessing.Binarizer(), X),
        "preprocessing.KernelCenterer": transformed(preprocessing.KernelCenterer(), SQUARE),
        "preprocessing.PolynomialFeatures": transformed(preprocessing.PolynomialFeatures(), X),
        "preprocessing.LabelEncoder": transformed(preprocessing.LabelEncoder(), CLASSES),
        "decomposition.PCA": transformed(decomposition.PCA(2, svd_solver="full"), X),
        "linear_model.Ridge": predicted(linear_model.Ridge(solver="svd"), TARGET),
        "linear_model.RidgeClassifier": predicted(linear_model.RidgeClassifier(solver="svd"), BINARY),
        "discriminant_analysis.LinearDiscriminantAnalysis": predicted(LinearDiscriminantAnalysis(), BINARY),
        "naive_bayes.GaussianNB": predicted(naive_bayes.GaussianNB(), BINARY),
        "mixture.GaussianMixture": predicted(
            mixture.GaussianMixture(2, init_params="random_from_data", random_state=0), BINARY
        ),
        "model_selection.train_test_split": lambda a: model_selection.train_test_split(a(X), random_state=0),
    }


LIBRARIES: dict[str, Callable[[], dict[str, Any]]] = {
    "einops": einops,
    "array_api_compat": array_api_compat,
    "array_api_extra": array_api_extra,
    "scipy": scipy,
    "sklearn": sklearn,
}
