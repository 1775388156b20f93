using '../../../infra/bicep/main.bicep'

param namespaceName = 'contoso-maintenance'
param forwardPrincipalIds = ['11111111-1111-1111-1111-111111111111']
