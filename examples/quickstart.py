"""Five sizes of one network, trained together; InCo against plain averaging on the same seed, partition and cohorts."""

import incofl

for method in ("heteroavg", "incoavg"):
    config = {"rounds": 10, "seed": 0, "data": {"alpha": 0.5}}
    result = incofl.run(config, out=f"runs/quickstart-{method}", method=method, resume=True)
    levels = "  ".join(f"{accuracy:.3f}" for accuracy in result["accuracy_by_level"])
    print(f"{method:9}  mean {result['accuracy']:.3f}  by level, small to large: {levels}")
