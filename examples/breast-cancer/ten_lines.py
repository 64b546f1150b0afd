import pandas as pd
from sklearn.datasets import load_breast_cancer

import coterie as ct

table = load_breast_cancer(as_frame=True).frame
table["clinic"] = "clinic-" + pd.qcut(table["mean texture"], 8, labels=False).astype(str)
public = {"mean radius": (5, 30), "mean smoothness": (0, 0.2), "mean concavity": (0, 0.5), "target": [0, 1]}
old, new = table[["clinic", *public]][:-20], table[-20:]
clinics = ct.federation(old, client="clinic", label="target", bounds=public, epsilon=3, out="clinics")
run = ct.run(clinics.experiment, out="runs/clinics")
print(run.guarantee, run.predict(new, client="clinic-7"), sep="\n")
