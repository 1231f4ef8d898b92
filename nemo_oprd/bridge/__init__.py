"""OPRD-Bridge without Megatron: statistics of paired hidden states, the fit, and the artifact.

`row_sample` assigns responses to the training, selection and test parts and keeps a bounded sample of rows.
`covariance` accumulates second moments. `fit` computes a teacher basis and a student projector from them. `build`
chooses the number of dimensions, computes the baselines, can train the projector as in the paper, and combines
these modules into a bridge. `maps` defines the bridge in memory, with a full-width one that needs no fit; `artifact`
saves and loads it.

Dimension letters in this package:

    N   rows (supervised tokens)           Dt  hidden size of the teacher
    B   responses                          Ds  hidden size of the student
    R   coordinates of a projection: the bridge's rank, or all Dt before a rank is chosen
    G   candidates that are compared: penalties of the grid, or ranks
    C   capacity of the sample of rows     D   Dt or Ds, where a function serves either model

Names carry them: `student_NDs` is [N, Ds], `basis_RDt` [R, Dt], `sigma_DtDt` [Dt, Dt]. In equations the subscripts T
and S name the models: h_T, h_S are hidden states, P_T, P_S the projections, mu_T, mu_S training means.
"""
