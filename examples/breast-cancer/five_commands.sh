python -c 'import pandas as pd, sklearn.datasets as data; t = data.load_breast_cancer(as_frame=True).frame
t["clinic"] = "clinic-" + pd.qcut(t["mean texture"], 8, labels=False).astype(str)
t = t[["clinic", "mean radius", "mean smoothness", "mean concavity", "target"]]
t[:-20].to_csv("clinics.csv", index=False); t[-20:].to_csv("new.csv", index=False)'
coterie init --data clinics.csv --client clinic --label target --epsilon 3 --bound "mean radius=5 to 30" \
    --bound "mean smoothness=0 to 0.2" --bound "mean concavity=0 to 0.5" --bound "target=0, 1"
coterie run clinics/experiment.yaml --out runs/clinics
coterie predict runs/clinics --data new.csv --client clinic-7 --out predictions.csv
coterie verify runs/clinics
