"""Programs beside training, which imports none of them: plan, doctor, rehearse, families, report, toy."""
